#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "launch/plan.h"

namespace lockstep {

/// `lockstep join`: makes this machine one of a run of --islands.
class JoinCommand {
 public:
  explicit JoinCommand(CLI::App& app);
  bool asked_for() const { return command_->parsed(); }
  /// Runs this machine's ranks until they or the run end. Returns the exit code; throws LaunchError.
  int run(const EnvironmentBlock& environment) const;

 private:
  CLI::App* command_;
  std::string coordinator_, key_file_, name_;
};

}  // namespace lockstep
