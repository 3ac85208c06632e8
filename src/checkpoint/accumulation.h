#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>

#include <lockstep/group.h>

#include "checkpoint/checkpoint_part.h"

namespace lockstep {

/// Adds to a checkpoint, for each model that accumulates backward passes, the number of passes per step, and the number
/// of ranks. Adds nothing if no model does.
void insert_accumulation(c10::impl::GenericDict& whole, const std::vector<CheckpointPart>& parts, const Group& group);

/// Compares the accumulation recorded in a resumed checkpoint with the program's. The program may call accumulate()
/// only after resume(), so the first save after it checks again. A difference is a warning, not an error: a program
/// that also changes the batch size has steps of as many samples as before.
class AccumulationCheck {
 public:
  void note_resumed(const c10::impl::GenericDict& whole, int64_t step, const std::vector<CheckpointPart>& parts,
                    const Group& group);
  void look_before_save(int64_t step, const std::vector<CheckpointPart>& parts, const Group& group);

 private:
  void look(const std::vector<CheckpointPart>& parts, const Group& group, int if_not_said);

  std::map<std::string, int64_t> saved_;  ///< passes by part, without those already compared
  int64_t step_ = 0;
};

}  // namespace lockstep
