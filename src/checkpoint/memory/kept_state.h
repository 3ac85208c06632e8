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

}  // namespace lockstep
