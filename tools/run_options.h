#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// What `lockstep run` is asked for.
struct RunRequest {
  LaunchOptions options;
  EnvironmentBlock variables;  ///< of --env
  bool dry_run = false;
  std::string help;  ///< not empty: only this is to be printed
};

/// Reads the words after `lockstep run`. Throws LaunchError (bad command line).
RunRequest parse_run_command(std::vector<std::string> words, int usable_cores, int gpus = 0);

extern const char* const kRunUsage;

}  // namespace lockstep
