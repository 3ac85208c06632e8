#include "checkpoint/accumulation.h"

#include "collectives/group_state.h"

namespace lockstep {
namespace {

using AccumulationDict = c10::impl::GenericDict;

// A key next to the names of parts, which may not use it.
const std::string kOfRanks = kRanksKey;

/// The number of virtual ranks, if there are any.
int64_t ranks_of(const Group& group) {
  const auto& virtual_ranks = state_of(group).virtual_ranks;
  return virtual_ranks ? virtual_ranks->count() : group.world_size();
}

}  // namespace

void insert_accumulation(AccumulationDict& whole, const std::vector<CheckpointPart>& parts, const Group& group) {
  AccumulationDict passes = new_dict();
  for (const CheckpointPart& part : parts)
    if (const int64_t count = part.accumulation ? part.accumulation() : 0; count > 1) passes.insert(part.name, count);
  if (passes.empty()) return;
  passes.insert(kOfRanks, ranks_of(group));
  whole.insert(kAccumulationKey, passes);
}

void AccumulationCheck::note_resumed(const AccumulationDict& whole, int64_t step,
                                     const std::vector<CheckpointPart>& parts, const Group& group) {
  saved_.clear();
  step_ = step;
  AccumulationDict passes = new_dict();
  if (whole.contains(kAccumulationKey)) passes = whole.at(kAccumulationKey).toGenericDict();
  // A different number of ranks may well accumulate another number of passes, so that a step has as many samples.
  if (passes.contains(kOfRanks) && passes.at(kOfRanks).toInt() != ranks_of(group)) return;
  for (const CheckpointPart& part : parts)
    if (part.accumulation) saved_[part.name] = passes.contains(part.name) ? passes.at(part.name).toInt() : 1;
  look(parts, group, /*if_not_said=*/0);
}

void AccumulationCheck::look_before_save(int64_t step, const std::vector<CheckpointPart>& parts, const Group& group) {
  if (!saved_.empty() && step > step_) look(parts, group, /*if_not_said=*/1);
}

void AccumulationCheck::look(const std::vector<CheckpointPart>& parts, const Group& group, int if_not_said) {
  for (const CheckpointPart& part : parts) {
    const auto saved = saved_.find(part.name);
    if (saved == saved_.end()) continue;
    const int64_t said = part.accumulation(), now = said > 0 ? said : if_not_said;
    if (now == 0) continue;
    if (now != saved->second && group.rank() == 0) {
      TORCH_WARN("the checkpoint was saved by a run in which ", saved->second,
                 saved->second == 1 ? " backward pass" : " backward passes", " of `", part.name,
                 "` made a step, and in this run ", now, now == 1 ? " does" : " do",
                 ", so its steps would cover other samples; call accumulate(", saved->second,
                 ") as that run did, unless you have also changed the batch size");
    }
    saved_.erase(saved);
  }
}

}  // namespace lockstep
