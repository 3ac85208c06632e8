#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace lockstep {

/// A program and its arguments under the debugger found in `search_path`: gdb, else lldb. The path `program` replaces
/// `command[0]`. Throws LaunchError (not started) if there is none.
struct DebuggerCommand {
  std::string program;  ///< path of the debugger
  std::vector<std::string> arguments;
};
DebuggerCommand under_debugger(const std::string& program, const std::vector<std::string>& command,
                               const std::string& search_path);

/// Throws LaunchError (bad command line) unless a debugger can use the launcher's terminal: stdin and stdout are
/// terminals, and the launcher is in the foreground.
void check_terminal_for_debugger();

/// Lends the terminal of stdin to a child's process group until destroyed. Meanwhile the launcher may still write to
/// it.
class LentTerminal {
 public:
  explicit LentTerminal(pid_t group);
  ~LentTerminal();
  LentTerminal(const LentTerminal&) = delete;
  LentTerminal& operator=(const LentTerminal&) = delete;

 private:
  sigset_t mask_;
};

}  // namespace lockstep
