#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// The commands on files: `lockstep inspect` shows a file's contents, and `lockstep convert` writes them in another
/// format.
class FileCommands {
 public:
  explicit FileCommands(CLI::App& app);

  bool asked_for() const { return inspect_->parsed() || convert_->parsed(); }
  /// Returns the exit code; throws LaunchError.
  int run() const;

 private:
  CLI::App* inspect_;
  CLI::App* convert_;
  std::string from_, to_;
};

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

}  // namespace lockstep
