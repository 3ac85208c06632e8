#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// Facts about the machine and the process for a run's log. Unreadable ones are empty or 0.
struct SystemFacts {
  std::string host;
  std::string system;  ///< "Debian GNU/Linux 12 (bookworm)"
  std::string kernel;  ///< "Linux 6.1.0 x86_64"
  std::string cpu;
  int usable_cores = 0;
  int64_t memory_bytes = 0;
  int64_t pid = 0;
  std::string folder;                ///< the working folder
  std::vector<std::string> command;  ///< the program and its arguments
  std::string lockstep_version;
};

SystemFacts system_facts();

}  // namespace lockstep
