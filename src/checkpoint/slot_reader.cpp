#include "checkpoint/slot_reader.h"

#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/memory/kept_state.h"
#include "checkpoint/memory/slot_source.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/sliced_memory.h"

namespace lockstep {

std::vector<WholeSlot> SlotReader::intact(size_t most) const {
  std::vector<WholeSlot> intact;
  for (WholeSlot& slot : whole_slots(memory_)) {
    if (slot.header.owner != owner_ || intact.size() == most) continue;
    const std::string problem = problem_of(slot);
    if (problem.empty())
      intact.push_back(std::move(slot));
    else
      TORCH_WARN("the checkpoint in memory of step ", slot.header.step, " is not used: ", problem);
  }
  return intact;
}

std::string SlotReader::problem_of(const WholeSlot& slot) const {
  return failure_of([&] {
    const auto look_at = [&](const std::string& name, uint64_t offset, uint64_t bytes) {
      const SlotSource source(name, memory_, offset, bytes);
      const PtFile file(source);
    };
    look_at("the part that ranks share", StateMemory::common_at(slot.slot), slot.header.common_bytes);
    for (int rank = 0; rank < slot.world_size(); ++rank)
      look_at("the part of rank " + std::to_string(rank), StateMemory::own_at(slot.slot, rank),
              slot.own_bytes[static_cast<size_t>(rank)]);
  });
}

ImageSlices SlotReader::slices(const WholeSlot& slot) const {
  const SlotSource source("the part of rank 0", memory_, StateMemory::own_at(slot.slot, 0), slot.own_bytes.at(0));
  const c10::impl::GenericDict own = ObjectReader(source).object().toGenericDict();
  return own.contains(kSlicesKey) ? ImageSlices::decode(own.at(kSlicesKey).toStringRef()) : ImageSlices();
}

namespace {

/// The storages of the tensors in a value.
void add_storages(const PickleTree& tree, NodeId id, std::set<NodeId>& seen, std::set<size_t>& storages) {
  if (!seen.insert(id).second) return;
  const Node& node = tree[id];
  if (node.kind == NodeKind::kTensor) storages.insert(tree.tensors[static_cast<size_t>(node.integer)].storage);
  if (node.kind == NodeKind::kTuple || node.kind == NodeKind::kList || node.kind == NodeKind::kDict)
    for (const NodeId item : node.items) add_storages(tree, item, seen, storages);
}

/// Those of the parts that are read in part.
std::set<size_t> storages_of_parts(const PickleTree& tree, const std::function<bool(const std::string&)>& is_partial) {
  std::set<size_t> storages;
  std::set<NodeId> seen;
  const Node& root = tree[tree.root];
  for (size_t i = 0; root.kind == NodeKind::kDict && i + 1 < root.items.size(); i += 2) {
    const Node& key = tree[root.items[i]];
    if (key.kind == NodeKind::kText && is_partial(std::string(key.text)))
      add_storages(tree, root.items[i + 1], seen, storages);
  }
  return storages;
}

}  // namespace

OpenSlot SlotReader::open(uint64_t sequence, const std::function<bool(const std::string& part)>& is_partial) const {
  std::optional<WholeSlot> whole;
  for (WholeSlot& slot : whole_slots(memory_))
    if (slot.sequence == sequence) whole = std::move(slot);
  if (!whole) throw RefusedInput("the checkpoint in memory is gone");
  OpenSlot open{.slot = *whole, .slices = slices(*whole), .image = {}, .partial = {}};
  const SlotSource source("the checkpoint in memory", memory_, StateMemory::common_at(whole->slot),
                          whole->header.common_bytes);
  ObjectReader reader(source);
  const PtFile& file = reader.file();
  std::set<size_t> unread = storages_of_parts(file.tree(), is_partial);
  for (size_t storage = 0; storage < file.tree().storages.size(); ++storage)
    if (open.slices.storage_at(file.storage_offset(storage)) != nullptr && file.storage_bytes(storage) > 0)
      unread.insert(storage);
  for (const size_t storage : unread) {
    open.partial.push_back(
        {file.storage_offset(storage), partial_zeros(static_cast<int64_t>(file.storage_bytes(storage)))});
    reader.set_storage(storage, open.partial.back().bytes);
  }
  const auto own = [&memory = memory_, whole](size_t rank) {
    const SlotSource of_rank("the checkpoint in memory", memory,
                             StateMemory::own_at(whole->slot, static_cast<int>(rank)), whole->own_bytes.at(rank));
    return ObjectReader(of_rank).object().toGenericDict();
  };
  CheckpointImage& image = open.image;
  image.whole = reader.object().toGenericDict();
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
  return open;
}

}  // namespace lockstep
