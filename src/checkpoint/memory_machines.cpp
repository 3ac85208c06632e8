#include "checkpoint/memory_machines.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include "base/byte_sink.h"
#include "base/error.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_message.h"

namespace lockstep {
namespace {

constexpr uint64_t kPiece = 16 << 20;  // sent at a time

struct StringSink : ByteSink {
  void write(const void* data, size_t size) override { bytes.append(static_cast<const char*>(data), size); }
  std::string bytes;
};

std::vector<uint64_t> numbers_in(const std::string& text) {
  std::istringstream stream(text);
  std::vector<uint64_t> numbers;
  for (uint64_t number; stream >> number;) numbers.push_back(number);
  return numbers;
}

std::string text_of(const std::vector<uint64_t>& numbers) {
  std::string text;
  for (const uint64_t number : numbers) text += std::to_string(number) + " ";
  return text;
}

std::vector<uint64_t> sequences_of(const std::vector<WholeSlot>& slots) {
  std::vector<uint64_t> sequences;
  for (const WholeSlot& slot : slots) sequences.push_back(slot.sequence);
  return sequences;
}

/// The highest number that is in all of these sets; 0: none.
uint64_t newest_common(const std::vector<std::vector<uint64_t>>& sets) {
  uint64_t newest = 0;
  for (const uint64_t one : sets.front()) {
    const auto has = [&](const std::vector<uint64_t>& set) {
      return std::find(set.begin(), set.end(), one) != set.end();
    };
    if (std::all_of(sets.begin(), sets.end(), has)) newest = std::max(newest, one);
  }
  return newest;
}

std::string describe(const WholeSlot& slot) {
  std::vector<uint64_t> numbers = {slot.sequence, static_cast<uint64_t>(slot.header.step), slot.header.owner,
                                   slot.header.layout, slot.header.common_bytes};
  numbers.insert(numbers.end(), slot.own_bytes.begin(), slot.own_bytes.end());
  return text_of(numbers);
}

WholeSlot described(const std::string& text) {
  const std::vector<uint64_t> numbers = numbers_in(text);
  if (numbers.size() < 6) throw Error("a machine describes its checkpoint in memory wrongly");
  return {.sequence = numbers[0],
          .header = {.step = static_cast<int64_t>(numbers[1]),
                     .owner = numbers[2],
                     .layout = numbers[3],
                     .common_bytes = numbers[4]},
          .own_bytes = {numbers.begin() + 5, numbers.end()}};
}

}  // namespace

MemoryMachines::MemoryMachines(std::vector<int> first_ranks, int rank)
    : first_ranks_(std::move(first_ranks)), rank_(rank) {
  const int mine = first_ranks_[static_cast<size_t>(rank)];
  std::vector<int> here, elsewhere;
  for (size_t i = 0; i < first_ranks_.size(); ++i)
    (first_ranks_[i] == mine ? here : elsewhere).push_back(static_cast<int>(i));
  several_ = !elsewhere.empty();
  ranks_here_ = static_cast<int>(here.size());
  rank_here_ = static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());
  for (auto i = static_cast<size_t>(rank_here_); i < elsewhere.size(); i += here.size()) kept_.push_back(elsewhere[i]);
}

void MemoryMachines::begin_keeping(SlotMemory& memory, SlotTurn turn) {
  for (const int rank : kept_) writers_.emplace_back(memory, rank, static_cast<int>(first_ranks_.size()), turn);
}

void MemoryMachines::exchange(const Group& group, const ObjectWriter& own, uint64_t layout) {
  if (!several_) return;
  StringSink mine;
  mine.write(&layout, sizeof layout);
  own.write(mine, "state", ZipWriter::Checksums::kWholeEntries);
  told_ = group.all_gather_bytes(mine.bytes);
}

void MemoryMachines::keep(const SaveHeader& mine) {
  for (size_t i = 0; i < writers_.size(); ++i) {
    const std::string& told = told_[static_cast<size_t>(kept_[i])];
    SaveHeader header = mine;
    std::memcpy(&header.layout, told.data(), sizeof header.layout);
    const uint64_t own_bytes = told.size() - sizeof header.layout;
    writers_[i].begin();
    writers_[i].write_own(0, told.data() + sizeof header.layout, own_bytes);
    writers_[i].finish(header, own_bytes);
  }
  told_.clear();
}

SlotTurn MemoryMachines::agree_on_turn(const Group& group, const SlotMemory& memory) {
  SlotTurn turn = first_turn(memory);
  const std::vector<WholeSlot> whole = whole_slots(memory);
  std::vector<std::vector<uint64_t>> all;
  const std::string mine = std::to_string(turn.sequence) + " " + text_of(sequences_of(whole));
  for (const std::string& said : group.all_gather_bytes(mine)) {
    std::vector<uint64_t> numbers = numbers_in(said);
    turn.sequence = std::max(turn.sequence, numbers.at(0));
    all.emplace_back(numbers.begin() + 1, numbers.end());
  }
  // A machine may hold a newer state than all have in common; that one is overwritten.
  const uint64_t kept = newest_common(all);
  for (const WholeSlot& slot : whole)
    if (slot.sequence == kept) turn.slot = 1 - slot.slot;
  return turn;
}

std::optional<WholeSlot> MemoryMachines::newest_for_all(const Group& group, SlotMemory& memory,
                                                        const std::vector<WholeSlot>& mine) const {
  const auto said = group.all_gather_bytes(text_of(sequences_of(mine)));
  std::vector<std::vector<uint64_t>> sets;
  std::vector<int> leaders;
  uint64_t newest = 0;
  int holder = -1;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (first_ranks_[rank] != static_cast<int>(rank)) continue;
    leaders.push_back(static_cast<int>(rank));
    sets.push_back(numbers_in(said[rank]));
    for (const uint64_t sequence : sets.back())
      if (sequence > newest) newest = sequence, holder = static_cast<int>(rank);
  }
  if (newest == 0) return {};
  const uint64_t common = newest_common(sets);
  WholeSlot chosen;
  for (const WholeSlot& slot : mine)
    if (slot.sequence == (common != 0 ? common : newest)) chosen = slot;
  if (common != 0) return chosen;

  std::string lacking;
  bool receives = false;
  for (size_t i = 0; i < leaders.size(); ++i) {
    if (std::find(sets[i].begin(), sets[i].end(), newest) != sets[i].end()) continue;
    lacking += (lacking.empty() ? "" : ", ") + std::to_string(leaders[i]);
    receives = receives || leaders[i] == rank_;
  }
  const std::string problem = send(group, memory, holder, receives, chosen);
  if (rank_ == 0) {
    TORCH_WARN("the machines of ranks ", lacking, " do not hold the checkpoint in memory of step ", chosen.header.step,
               problem.empty() ? "; that of rank " + std::to_string(holder) + " has sent it to them"
                               : " and cannot be sent it, so it is left out: " + problem);
  }
  if (!problem.empty()) return {};
  return chosen;
}

/// The machine of `root` sends its `slot` to the machines whose leader receives. Returns the error.
/// REQUIRES: all ranks call it.
std::string MemoryMachines::send(const Group& group, SlotMemory& memory, int root, bool receives,
                                 WholeSlot& slot) const {
  const int from = slot.slot;
  slot = described(group.broadcast_bytes(rank_ == root ? describe(slot) : "", root));
  const uint64_t bytes = std::accumulate(slot.own_bytes.begin(), slot.own_bytes.end(), slot.header.common_bytes);
  std::vector<SlotWriter> writers;
  std::string problem;
  if (receives)
    problem = failure_of([&] {
      if (bytes > available_memory_bytes())
        throw LimitError("it takes " + std::to_string(bytes >> 20) + " MiB, and only " +
                         std::to_string(available_memory_bytes() >> 20) + " MiB are available");
      slot.slot = first_turn(memory).slot;
      for (int rank = 0; rank < slot.world_size(); ++rank) {
        writers.emplace_back(memory, rank, slot.world_size(), SlotTurn{slot.slot, slot.sequence});
        writers.back().begin();
      }
    });
  const auto copy = [&](uint64_t there, uint64_t here, uint64_t count) {
    for (uint64_t done = 0; done < count; done += kPiece) {
      std::string piece(rank_ == root ? std::min(kPiece, count - done) : 0, '\0');
      if (rank_ == root && problem.empty())
        problem = failure_of([&] { memory.read(there + done, piece.data(), piece.size()); });
      const std::string got = group.broadcast_bytes(piece, root);
      if (receives && problem.empty()) problem = failure_of([&] { memory.write(here + done, got.data(), got.size()); });
    }
  };
  copy(StateMemory::common_at(from), StateMemory::common_at(slot.slot), slot.header.common_bytes);
  for (int rank = 0; rank < slot.world_size(); ++rank)
    copy(StateMemory::own_at(from, rank), StateMemory::own_at(slot.slot, rank),
         slot.own_bytes[static_cast<size_t>(rank)]);
  // A state that could be read only in part must not be whole anywhere.
  const auto all_well = [&] {
    for (const std::string& one : group.all_gather_bytes(problem))
      if (!one.empty()) return one;
    return std::string();
  };
  if (const std::string failed = all_well(); !failed.empty()) return failed;
  for (size_t rank = 0; rank < writers.size(); ++rank) writers[rank].finish(slot.header, slot.own_bytes[rank]);
  group.barrier();  // no rank reads it before
  if (!receives) slot.slot = from;
  return "";
}

}  // namespace lockstep
