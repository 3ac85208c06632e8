#pragma once

#include <CLI/CLI.hpp>

#include <string>

/// `lockstep report`: a page about a run.
class ReportCommand {
 public:
  explicit ReportCommand(CLI::App& app);

  bool asked_for() const { return command_->parsed(); }
  /// Returns the exit code. Throws LaunchError.
  int run() const;

 private:
  CLI::App* command_;
  std::string folder_, output_;
};
