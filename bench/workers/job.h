#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "workers/line_channel.h"
#include "workers/system.h"

namespace lockstep::bench {

/// A system that broke, with what it said last.
class JobError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The running workers of one system. They sleep except between a command and its answers. Throws JobError when a
/// worker dies, is silent for too long or answers nonsense; nothing of it runs any more once it is destroyed.
class Job {
 public:
  /// Starts all ranks and waits until each has connected and sent `hello RANK VERSION`. `folder` is empty and its own.
  Job(const System& system, int ranks, const std::string& folder);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const std::string& version() const { return version_; }

  /// Sends a command to all ranks; returns their answers, by rank.
  std::vector<std::string> ask(const std::string& command);
  /// Throws JobError with the last words of the system.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void start(const System& system, const std::string& socket);
  void accept_ranks(int listener, int ranks);
  void end();

  const std::string name_;
  const std::string output_path_;  ///< what launcher and workers print
  int pid_ = -1;                   ///< the launcher's, which leads a session of its own
  std::string version_;
  std::vector<LineChannel> channels_;  ///< by rank
};

}  // namespace lockstep::bench
