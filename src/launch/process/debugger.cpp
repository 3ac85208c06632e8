#include "launch/process/debugger.h"

#include <unistd.h>

#include "launch/launch_error.h"
#include "launch/plan.h"

namespace lockstep {

DebuggerCommand under_debugger(const std::string& program, const std::vector<std::string>& command,
                               const std::string& search_path) {
  DebuggerCommand debugger;
  try {
    debugger = {find_program("gdb", search_path), {"gdb", "-q", "--args", program}};
  } catch (const LaunchError&) {
    try {
      debugger = {find_program("lldb", search_path), {"lldb", "--", program}};
    } catch (const LaunchError&) {
      throw LaunchError(kExitNotStarted, "--debugger: neither gdb nor lldb is in PATH (" + search_path +
                                             "); install one (Debian: apt-get install gdb)");
    }
  }
  debugger.arguments.insert(debugger.arguments.end(), command.begin() + 1, command.end());
  return debugger;
}

void check_terminal_for_debugger() {
  const auto refuse = [](const std::string& why) {
    throw LaunchError(kExitBadCommandLine,
                      "--debugger needs the terminal, but " + why + "; run it in a terminal, with nothing redirected");
  };
  if (::isatty(STDIN_FILENO) != 1) refuse("stdin is not one");
  if (::isatty(STDOUT_FILENO) != 1) refuse("stdout is not one");
  if (::tcgetpgrp(STDIN_FILENO) != ::getpgrp()) refuse("the launcher runs in the background");
}

LentTerminal::LentTerminal(pid_t group) {
  // In the background, SIGTTOU would stop this process when it takes the terminal back or, on some terminals, writes to
  // it.
  sigset_t output;
  sigemptyset(&output);
  sigaddset(&output, SIGTTOU);
  ::sigprocmask(SIG_BLOCK, &output, &mask_);
  ::tcsetpgrp(STDIN_FILENO, group);
  ::kill(-group, SIGCONT);  // it may have read before the terminal was its own
}

LentTerminal::~LentTerminal() {
  ::tcsetpgrp(STDIN_FILENO, ::getpgrp());
  ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
}

}  // namespace lockstep
