#include "launch/process/own_program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "base/proc_file.h"
#include "base/usable_cores.h"
#include "launch/error_page.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "launch/ranks_argument.h"

namespace lockstep {
namespace {

constexpr const char* kSelf = "/proc/self/exe";

/// As the launcher's main() does.
int launch_and_report(const RanksArgument& asked) {
  try {
    LaunchOptions options;
    options.ranks = asked.ranks;
    options.program = own_program();
    options.command = asked.arguments;
    options.hang_timeout = asked.hang_timeout.value_or(options.hang_timeout);
    options.grace = asked.grace.value_or(options.grace);
    return launch(options, own_environment());
  } catch (const LaunchError& error) {
    return print_launcher_error(error, error.exit_code);
  } catch (const Error& error) {
    return print_launcher_error(error, kExitResourceLimit);
  }
}

}  // namespace

std::string own_program() {
  std::error_code unknown;
  const auto path = std::filesystem::read_symlink(kSelf, unknown);
  struct stat named {
  }, executed{};
  if (!unknown && ::stat(path.c_str(), &named) == 0 && ::stat(kSelf, &executed) == 0 &&
      named.st_dev == executed.st_dev && named.st_ino == executed.st_ino)
    return path.string();
  return kSelf;  // a child's link leads to the same program, even after renaming
}

std::vector<std::string> own_arguments() {
  const std::string bytes = read_proc_file("/proc/self/cmdline");
  std::vector<std::string> arguments;
  for (size_t start = 0; start < bytes.size(); start += arguments.back().size() + 1)
    arguments.emplace_back(bytes.c_str() + start);
  return arguments;
}

EnvironmentBlock own_environment() {
  EnvironmentBlock block;
  for (char** variable = ::environ; *variable != nullptr; ++variable) block.emplace_back(*variable);
  return block;
}

void become_launcher_if_asked(const std::vector<std::string>& arguments, const std::string& launcher) {
  int code = kExitOk;
  try {
    const int cores = threads_per_rank({allowed_cpus()}, 0, cgroup_cpu_quota());
    const auto asked = find_ranks_argument(arguments, cores);
    if (!asked) return;
    if (!launcher.empty())
      throw Error("--ranks " + std::to_string(asked->ranks) + " is for a program that is started alone, but " +
                  launcher + " has started this one as a rank; leave --ranks out");
    std::cout.flush();
    code = launch_and_report(*asked);
  } catch (const LaunchError& error) {
    code = print_launcher_error(error, error.exit_code);
  }
  std::exit(code);
}

}  // namespace lockstep
