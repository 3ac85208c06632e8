#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/option_values.h"

namespace lockstep {

/// Identifies a process until the machine is rebooted: its pid may be reused, but not with the same start time.
struct ProcessIdentity {
  pid_t pid = 0;
  uint64_t start_ticks = 0;  ///< since boot, as in /proc/<pid>/stat; 0: there is no such process
};
ProcessIdentity identify(pid_t pid);
bool is_there(const ProcessIdentity& process);

/// The file RUN/run.json, by which `lockstep status` and others find the processes of a run. It exists while the ranks
/// run. If it cannot be written, the run continues without it.
class RunRecord {
 public:
  struct Contents {
    ProcessIdentity launcher;
    int board_fd = -1;  ///< the launcher's descriptor of the board of pages; -1: none
    std::vector<ProcessIdentity> ranks;
    std::vector<std::string> hosts;    ///< by rank; "" or none: this machine
    std::string launch_command;        ///< starts a program on those hosts; "": none
    std::optional<RankRange> elastic;  ///< the number of ranks it may have
    int restarts = 0;                  ///< starts before this one
  };

  RunRecord(const std::string& folder, const Contents& contents);
  ~RunRecord();
  RunRecord(const RunRecord&) = delete;
  RunRecord& operator=(const RunRecord&) = delete;

  /// Throws Error if there is none, or one not written by `lockstep run`.
  static Contents read(const std::string& folder);

 private:
  std::string path_;
};

}  // namespace lockstep
