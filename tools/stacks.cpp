#include "stacks.h"

#include <iostream>
#include <string>
#include <vector>

#include "capture.h"
#include "launch/launch_error.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kStackTimeout(60);

/// The command that prints the stacks of a running process without asking anything; empty where there is none.
std::vector<std::string> stack_printer(pid_t pid) {
  const std::string number = std::to_string(pid);
  if (capture({"eu-stack", "--version"}, std::chrono::seconds(5)).exit_code == 0)
    return {"eu-stack", "-n", "40", "-p", number};
  if (capture({"gdb", "--version"}, std::chrono::seconds(5)).exit_code == 0)
    return {"gdb", "-nx", "-batch", "-p", number, "-ex", "thread apply all backtrace 40"};
  return {};
}

}  // namespace

bool print_stacks(pid_t pid) {
  const auto printer = stack_printer(pid);
  if (printer.empty())
    throw LaunchError(kExitNotStarted,
                      "neither eu-stack nor gdb is in PATH; install one (Debian: apt-get install gdb)");
  const Captured said = capture(printer, kStackTimeout);
  const bool refused = (said.err + said.out).find("ot permitted") != std::string::npos;
  if (refused)
    std::cout
        << "the kernel does not permit a look into it: run this as its user with kernel.yama.ptrace_scope=0, or as "
           "root; in a container have CAP_SYS_PTRACE\n";
  else if (said.exit_code != 0)
    std::cout << printer[0] << " failed: " << (said.failure.empty() ? said.err : said.failure) << "\n";
  else
    std::cout << said.out;
  return !refused && said.exit_code == 0;
}

}  // namespace lockstep
