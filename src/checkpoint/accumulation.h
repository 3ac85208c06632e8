#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>

#include <lockstep/group.h>

#include "checkpoint/checkpoint_part.h"

namespace lockstep {

/// For a checkpoint: how many backward passes made a step of each model that accumulates them, and on how many ranks.
/// Nothing where none does.
void insert_accumulation(c10::impl::GenericDict& whole, const std::vector<CheckpointPart>& parts, const Group& group);

/// Compares what a resumed checkpoint has of it with what the program does then. Its loop may call accumulate() only
/// after resume(), so the first save that follows looks again. A difference is a warning and no error, because who
/// changes the batches with it has steps of as many samples as before.
class AccumulationCheck {
 public:
  /// What is in a checkpoint of `step`.
  void note_resumed(const c10::impl::GenericDict& whole, int64_t step, const std::vector<CheckpointPart>& parts,
                    const Group& group);
  /// Before a save of `step`.
  void look_before_save(int64_t step, const std::vector<CheckpointPart>& parts, const Group& group);

 private:
  void look(const std::vector<CheckpointPart>& parts, const Group& group, int if_not_said);

  std::map<std::string, int64_t> saved_;  ///< passes by part; without those that were compared
  int64_t step_ = 0;
};

}  // namespace lockstep
