#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// `lockstep resize RUN N`: makes a run save, and continue with another number of ranks.
class ResizeCommand {
 public:
  explicit ResizeCommand(CLI::App& app);
  bool asked_for() const { return command_->parsed(); }
  /// Waits until the new ranks have been started. Returns the exit code; throws LaunchError.
  int run() const;

 private:
  CLI::App* command_;
  std::string folder_, ranks_, timeout_ = "60";
};

}  // namespace lockstep
