#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// `lockstep explain [WHAT]`: what docs/errors.md says about an exit code or a message.
class ExplainCommand {
 public:
  explicit ExplainCommand(CLI::App& app);

  bool asked_for() const { return explain_->parsed(); }
  /// Returns the exit code. Throws LaunchError.
  int run() const;

 private:
  CLI::App* explain_;
  std::vector<std::string> words_;
};

}  // namespace lockstep
