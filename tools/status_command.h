#pragma once

#include <sys/types.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

namespace lockstep {

/// `lockstep status RUN` and `lockstep stacks RUN`: the current activity of each rank of a run. `lockstep status
/// --all`: the runs in progress.
class StatusCommand {
 public:
  explicit StatusCommand(CLI::App& app);

  bool asked_for() const { return status_->parsed() || stacks_->parsed(); }
  /// Returns the exit code. Throws LaunchError.
  int run() const;

 private:
  CLI::App* status_;
  CLI::App* stacks_;
  std::string folder_;
  bool all_ = false;
};

/// Whether `folder` is that of a run of --islands.
bool has_rounds(const std::string& folder);

/// Which machine has taken part in the rounds of a run of --islands, during the run and after it. Throws LaunchError
/// (refused input) if its file is of another form.
std::string rounds_text(const std::string& folder);

/// The longest time that a process is stopped while its stacks are read.
constexpr std::chrono::seconds kLongestStop(5);

/// Prints the stacks of all threads of a process of this machine. Returns false if that failed, at least in part, after
/// printing the reason. Throws LaunchError (not started) if there is no program that can do it.
bool print_stacks(pid_t pid);

}  // namespace lockstep
