#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// `lockstep tour`: trains a small model on two ranks, kills one of them, lets the run continue, changes the number of
/// ranks and draws the report. Needs no LibTorch.
class TourCommand {
 public:
  explicit TourCommand(CLI::App& app);

  bool asked_for() const { return tour_->parsed(); }
  /// Returns the exit code; throws LaunchError.
  int run() const;

 private:
  CLI::App* tour_;
  std::string folder_;
};

}  // namespace lockstep
