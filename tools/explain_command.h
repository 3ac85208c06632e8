#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// `lockstep explain [WHAT]`: prints the explanation of an exit code or a message from docs/errors.md.
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
