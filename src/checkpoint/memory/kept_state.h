#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// The fate of the newest state in a launcher's memory at the end of its run.
struct KeptState {
  int64_t step = -1;  ///< of that state; -1: none
  std::string path;   ///< of the checkpoint with that state or a newer one; empty: none
  int64_t path_step = 0;
  bool written = false;  ///< by this call; otherwise that checkpoint existed
  std::string problem;   ///< the reason why it is not in its proper folder; may be empty
};

/// The step of the newest whole state in the memory of this descriptor (StateMemory); -1: none.
int64_t newest_step_in_memory(int memory);

/// Writes the newest whole state in memory as a checkpoint that Checkpointer::resume() reads, in the folder of the
/// Checkpointer that saved it, unless that folder has one as new. If this is impossible, or `is_sound` is false (the
/// state must not be resumed automatically), writes it to `other_folder`, unless that is empty. Never throws: `problem`
/// holds the error.
/// REQUIRES: no process of the run is left.
KeptState keep_state(int memory, const std::string& other_folder, bool is_sound);

/// The key of each rank's own state: in a file, a list of .pt files in uint8 tensors; in memory, an entry of each
/// rank's own state.
constexpr const char* kRanksKey = "ranks";
/// The key of state taken from rank 0 alone: in memory, in rank 0's own state; in a file, with the rest of the part.
constexpr const char* kRankZeroKey = "rank_zero";

/// In rank 0's own state in memory: where slices lie in the common image (ImageSlices), if it has any.
constexpr const char* kSlicesKey = "slices";

}  // namespace lockstep
