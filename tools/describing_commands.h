#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "command_text.h"

namespace lockstep {

/// `lockstep completion bash|zsh|fish` and `lockstep man [run]`, whose output packages install.
class DescribingCommands {
 public:
  explicit DescribingCommands(CLI::App& app);

  bool asked_for() const { return completion_->parsed() || manual_->parsed(); }
  /// Returns the exit code; throws LaunchError.
  int run() const;

 private:
  std::string script(const std::vector<CommandText>& commands) const;

  const CLI::App& app_;
  CLI::App* completion_;
  CLI::App* manual_;
  std::string shell_, command_;
};

}  // namespace lockstep
