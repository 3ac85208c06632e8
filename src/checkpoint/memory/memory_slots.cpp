#include "checkpoint/memory/memory_slots.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/hash.h"
#include "base/state_memory.h"

namespace lockstep {
namespace {

/// A record, word by word. `check` is a hash of the others, which distinguishes a record from other data.
struct SlotRecord {
  uint64_t sequence = 0;  ///< 0: being written, or never was
  uint64_t step = 0, owner = 0, layout = 0, common_bytes = 0, own_bytes = 0, world_size = 0, sliced = 0;

  static constexpr int kWords = 9;

  uint64_t check() const {
    uint64_t value = Hash::kStart;
    for (const uint64_t word : {sequence, step, owner, layout, common_bytes, own_bytes, world_size, sliced})
      value = Hash::mixed(value, word);
    return value;
  }
  SaveHeader header() const {
    return {.step = static_cast<int64_t>(step), .owner = owner, .layout = layout, .common_bytes = common_bytes};
  }
};
static_assert(SlotRecord::kWords * uint64_t{8} <= StateMemory::kRecordBytes);

uint64_t word_of(int slot, int rank, int word) {
  return StateMemory::record_at(slot, rank) + static_cast<uint64_t>(word) * 8;
}

std::optional<SlotRecord> read_record(const SlotMemory& memory, int slot, int rank) {
  const auto word = [&](int index) { return memory.load(word_of(slot, rank, index)); };
  SlotRecord record{.sequence = word(0)};
  if (record.sequence == 0) return {};
  record.step = word(1);
  record.owner = word(2);
  record.layout = word(3);
  record.common_bytes = word(4);
  record.own_bytes = word(5);
  record.world_size = word(6);
  record.sliced = word(7);
  if (word(8) != record.check()) return {};
  return record;
}

}  // namespace

std::optional<WholeSlot> whole_slot(const SlotMemory& memory, int slot) {
  const auto first = read_record(memory, slot, 0);
  if (!first || first->world_size == 0 || first->world_size > StateMemory::kMaxRanks ||
      first->common_bytes > StateMemory::kCommonBytes)
    return {};
  WholeSlot whole{.slot = slot, .sequence = first->sequence, .header = first->header(), .own_bytes = {}, .sliced = {}};
  for (int rank = 0; rank < static_cast<int>(first->world_size); ++rank) {
    const auto record = read_record(memory, slot, rank);
    if (!record || record->sequence != first->sequence || record->world_size != first->world_size ||
        record->header() != whole.header || record->own_bytes > StateMemory::kOwnBytes)
      return {};
    whole.own_bytes.push_back(record->own_bytes);
    whole.sliced.push_back(record->sliced != 0);
  }
  return whole;
}

std::vector<WholeSlot> whole_slots(const SlotMemory& memory) {
  std::vector<WholeSlot> slots;
  for (const int slot : {0, 1})
    if (auto whole = whole_slot(memory, slot)) slots.push_back(std::move(*whole));
  if (slots.size() == 2 && slots[0].sequence < slots[1].sequence) std::swap(slots[0], slots[1]);
  return slots;
}

namespace {

const HeldState* find(const std::vector<HeldState>& machine, uint64_t sequence) {
  for (const HeldState& state : machine)
    if (state.sequence == sequence) return &state;
  return nullptr;
}

/// Whether the machines that hold the state have the slices of all ranks.
bool have_all_slices(const std::vector<std::vector<HeldState>>& machines, uint64_t sequence) {
  std::vector<bool> lacking;
  for (const auto& machine : machines) {
    const HeldState* state = find(machine, sequence);
    if (state == nullptr) continue;
    lacking.resize(state->sliced.size(), true);
    for (size_t rank = 0; rank < lacking.size() && rank < state->sliced.size(); ++rank)
      if (state->sliced[rank]) lacking[rank] = false;
  }
  return std::find(lacking.begin(), lacking.end(), true) == lacking.end();
}

}  // namespace

uint64_t newest_resumable(const std::vector<std::vector<HeldState>>& machines) {
  uint64_t on_all = 0, on_any = 0;
  for (const auto& machine : machines)
    for (const HeldState& state : machine) {
      if (!have_all_slices(machines, state.sequence)) continue;
      const auto has = [&](const auto& other) { return find(other, state.sequence) != nullptr; };
      if (std::all_of(machines.begin(), machines.end(), has)) on_all = std::max(on_all, state.sequence);
      on_any = std::max(on_any, state.sequence);
    }
  return on_all != 0 ? on_all : on_any;
}

namespace {

/// In front of the folder's characters. `check` is a hash of the others and of them.
struct Place {
  uint64_t owner = 0, size = 0, check = 0;
};

uint64_t check_of(const Place& place, const std::string& folder) {
  Hash hash;
  hash.add(folder);
  return Hash::mixed(Hash::mixed(hash.value(), place.owner), place.size);
}

}  // namespace

void note_place(SlotMemory& memory, uint64_t owner, const std::string& folder) {
  Place place{.owner = owner, .size = folder.size()};
  if (folder.size() > StateMemory::kPlaceBytes - sizeof place) return;
  place.check = check_of(place, folder);
  memory.write(StateMemory::place_at() + sizeof place, folder.data(), folder.size());
  memory.write(StateMemory::place_at(), &place, sizeof place);
}

std::string place_of(const SlotMemory& memory, uint64_t owner) {
  Place place;
  memory.read(StateMemory::place_at(), &place, sizeof place);
  if (place.owner != owner || place.size > StateMemory::kPlaceBytes - sizeof place) return "";
  std::string folder(place.size, '\0');
  memory.read(StateMemory::place_at() + sizeof place, folder.data(), folder.size());
  return place.check == check_of(place, folder) ? folder : "";
}

SlotTurn first_turn(const SlotMemory& memory) {
  const auto whole = whole_slots(memory);
  SlotTurn turn{.slot = whole.empty() ? 0 : 1 - whole.front().slot, .sequence = 1};
  // Above every number in use, including a save that did not end: its records must not complete a later save.
  for (const int slot : {0, 1})
    for (int rank = 0; rank < StateMemory::kMaxRanks; ++rank)
      turn.sequence = std::max(turn.sequence, memory.load(word_of(slot, rank, 0)) + 1);
  return turn;
}

int SlotWriter::unfinished_rank() const {
  if (!last_) return -1;
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto record = read_record(memory_, last_->slot, rank);
    if (!record || record->sequence != last_->sequence) return rank;
  }
  return -1;
}

void SlotWriter::begin() {
  memory_.store(word_of(turn_.slot, rank_, 0), 0);
  // The following writes overwrite a state whose record now says that it is being written. The record must be visible
  // first, for which a release does not suffice; on x86-64, stores that bypass the caches need this, too.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SlotWriter::write_common(uint64_t at, const void* data, uint64_t bytes) {
  memory_.write(StateMemory::common_at(turn_.slot) + at, data, bytes);
}

void SlotWriter::write_own(uint64_t at, const void* data, uint64_t bytes) {
  memory_.write(StateMemory::own_at(turn_.slot, rank_) + at, data, bytes);
}

void SlotWriter::finish(const SaveHeader& header, uint64_t own_bytes, bool sliced) {
  const SlotRecord record{.sequence = turn_.sequence,
                          .step = static_cast<uint64_t>(header.step),
                          .owner = header.owner,
                          .layout = header.layout,
                          .common_bytes = header.common_bytes,
                          .own_bytes = own_bytes,
                          .world_size = static_cast<uint64_t>(world_size_),
                          .sliced = sliced ? uint64_t{1} : 0};
  const uint64_t words[] = {record.step,      record.owner,      record.layout, record.common_bytes,
                            record.own_bytes, record.world_size, record.sliced, record.check()};
  for (int i = 1; i < SlotRecord::kWords; ++i) memory_.store(word_of(turn_.slot, rank_, i), words[i - 1]);
  memory_.store(word_of(turn_.slot, rank_, 0), record.sequence);
  last_ = turn_;
  turn_ = {.slot = 1 - turn_.slot, .sequence = turn_.sequence + 1};
}

}  // namespace lockstep
