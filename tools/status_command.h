#pragma once

#include <CLI/CLI.hpp>
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

}  // namespace lockstep
