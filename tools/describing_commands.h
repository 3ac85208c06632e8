#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// `lockstep completion bash|zsh` and `lockstep man [run]`, which --help does not list: packages install what they
/// print.
class DescribingCommands {
 public:
  explicit DescribingCommands(CLI::App& app);

  bool asked_for() const { return completion_->parsed() || manual_->parsed(); }
  /// Returns the exit code; throws LaunchError.
  int run() const;

 private:
  const CLI::App& app_;
  CLI::App* completion_;
  CLI::App* manual_;
  std::string shell_, command_;
};

}  // namespace lockstep
