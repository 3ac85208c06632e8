#pragma once

#include <chrono>
#include <deque>
#include <future>
#include <optional>
#include <string>

#include "base/file_descriptor.h"
#include "checkpoint/memory/kept_state.h"
#include "hosts/messages.h"
#include "hosts/node.h"

namespace lockstep::hosts {

/// The state in words; empty if there was nothing to keep.
std::string describe(const KeptState& kept);

/// Makes the agents write the states in their machines' memory, one after the other, so that agents with a common file
/// system write it once. Each machine has a whole copy of the state, perhaps of another step: the newest counts.
KeptState keep_states(std::deque<Node>& nodes, const std::string& other_folder, bool is_sound);

/// One machine's copy of the states that ranks keep in memory, for the ranks of a restart. When the run has given up,
/// the copy is written to disk, because it ends with this process.
class MachineMemory {
 public:
  MachineMemory();

  int fd() const { return memory_.get(); }

  /// Starts to write, on its own thread: it may take longer than the coordinator waits for a beat.
  /// REQUIRES: no ranks run meanwhile.
  void write(const Keep& order);
  /// True from write() until written() has returned a state.
  bool is_writing() const { return written_.valid(); }
  /// The state that was kept; empty if nothing is being written, or if writing takes longer than `time`.
  std::optional<KeptState> written(std::chrono::milliseconds time);

 private:
  const FileDescriptor memory_;
  std::future<KeptState> written_;
};

}  // namespace lockstep::hosts
