#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "hosts/key.h"
#include "launch/output/line_splitter.h"
#include "launch/plan.h"
#include "launch/poll_set.h"
#include "launch/process/guard.h"
#include "launch/process/process.h"

namespace lockstep::hosts {

/// The command that the coordinator runs to start an agent, and its output.
class AgentProcess {
 public:
  /// The command reads `key` from its standard input. Throws LaunchError.
  /// REQUIRES: `guard` outlives the object.
  AgentProcess(const std::vector<std::string>& words, const Key& key, const EnvironmentBlock& environment,
               const Guard& guard, const LauncherSettings& settings);
  ~AgentProcess();
  AgentProcess(const AgentProcess&) = delete;
  AgentProcess& operator=(const AgentProcess&) = delete;

  /// Reads its output and detects its end.
  void watch(PollSet& polled);
  /// Its end; empty until watch() has seen it.
  const std::optional<ProcessEnd>& end() const { return end_; }
  /// The descriptor to poll; -1: all output has been read.
  int output_fd() const { return output_.get(); }
  /// Lines printed since the last call.
  std::string read_output();
  /// The last line printed; empty if none.
  std::string last_line() const;

 private:
  const Guard& guard_;
  FileDescriptor output_;  // of both streams
  std::optional<Process> process_;
  std::optional<ProcessEnd> end_;
  LineSplitter lines_;
  Tail tail_;
};

}  // namespace lockstep::hosts
