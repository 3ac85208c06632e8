#include "checkpoint/slot_reader.h"

#include <optional>
#include <utility>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/memory/slot_source.h"
#include "checkpoint/memory/state_keys.h"
#include "checkpoint/object_reader.h"

namespace lockstep {

std::vector<WholeSlot> SlotReader::intact(size_t most) const {
  std::vector<WholeSlot> intact;
  for (WholeSlot& slot : whole_slots(memory_)) {
    if (slot.header.owner != owner_ || intact.size() == most) continue;
    const std::string problem = problem_of(slot);
    if (problem.empty())
      intact.push_back(std::move(slot));
    else
      TORCH_WARN("the checkpoint in memory of step ", slot.header.step, " is left out: ", problem);
  }
  return intact;
}

std::string SlotReader::problem_of(const WholeSlot& slot) const {
  return failure_of([&] {
    const auto look_at = [&](const std::string& name, uint64_t offset, uint64_t bytes) {
      const SlotSource source(name, memory_, offset, bytes);
      const PtFile file(source);
    };
    look_at("what ranks have in common", StateMemory::common_at(slot.slot), slot.header.common_bytes);
    for (int rank = 0; rank < slot.world_size(); ++rank)
      look_at("what rank " + std::to_string(rank) + " had", StateMemory::own_at(slot.slot, rank),
              slot.own_bytes[static_cast<size_t>(rank)]);
  });
}

CheckpointImage SlotReader::image(uint64_t sequence) const {
  std::optional<WholeSlot> whole;
  for (WholeSlot& slot : whole_slots(memory_))
    if (slot.sequence == sequence) whole = std::move(slot);
  if (!whole) throw RefusedInput("the checkpoint in memory is gone");
  const auto read = [&memory = memory_](uint64_t offset, uint64_t bytes) {
    const SlotSource source("the checkpoint in memory", memory, offset, bytes);
    return ObjectReader(source).object().toGenericDict();
  };
  const auto own = [read, whole](size_t rank) {
    return read(StateMemory::own_at(whole->slot, static_cast<int>(rank)), whole->own_bytes.at(rank));
  };
  CheckpointImage image;
  image.whole = read(StateMemory::common_at(whole->slot), whole->header.common_bytes);
  image.ranks = whole->own_bytes.size();
  image.state_of_rank = [own](size_t rank) { return own(rank).at(kRanksKey).toGenericDict(); };
  const c10::impl::GenericDict from_rank_zero = own(0).at(kRankZeroKey).toGenericDict();
  for (const auto& part : from_rank_zero) {
    if (!image.whole.contains(part.key())) {
      image.whole.insert(part.key(), part.value());
      continue;
    }
    c10::impl::GenericDict model = image.whole.at(part.key()).toGenericDict();  // its parameters; this has the rest
    for (const auto& item : part.value().toGenericDict()) model.insert(item.key(), item.value());
  }
  return image;
}

}  // namespace lockstep
