#include "checkpoint/memory_machines.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include <ATen/ATen.h>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/slot_reader.h"

namespace lockstep {
namespace {

constexpr uint64_t kPiece = 16 << 20;  // of what is sent at a time
constexpr uint64_t kSlicePiece = 4 << 20;
constexpr int kSlicesTag = (1 << 24) - 15;  // of messages that no program sends by accident

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

std::vector<HeldState> held_states(const std::vector<WholeSlot>& slots) {
  std::vector<HeldState> states;
  for (const WholeSlot& slot : slots) states.push_back({.sequence = slot.sequence, .sliced = slot.sliced});
  return states;
}

std::string text_of(const std::vector<HeldState>& states) {
  std::string text;
  for (const HeldState& state : states) {
    text += std::to_string(state.sequence) + ' ';
    for (const bool sliced : state.sliced) text += sliced ? '1' : '0';
    text += ' ';
  }
  return text;
}

std::vector<HeldState> states_in(std::istream& stream) {
  std::vector<HeldState> states;
  HeldState state;
  for (std::string flags; stream >> state.sequence >> flags; states.push_back(state)) {
    state.sliced.clear();
    for (const char flag : flags) state.sliced.push_back(flag == '1');
  }
  return states;
}

bool has(const std::vector<HeldState>& states, uint64_t sequence) {
  return std::any_of(states.begin(), states.end(), [&](const HeldState& one) { return one.sequence == sequence; });
}

/// Pieces of at most kSlicePiece.
std::vector<ByteRange> pieces_of(const std::vector<ByteRange>& ranges) {
  std::vector<ByteRange> pieces;
  for (const ByteRange& range : ranges)
    for (uint64_t at = range.begin; at < range.end; at += kSlicePiece)
      pieces.push_back({at, std::min(at + kSlicePiece, range.end)});
  return pieces;
}

std::string describe(const WholeSlot& slot) {
  std::vector<uint64_t> numbers = {slot.sequence, static_cast<uint64_t>(slot.header.step), slot.header.owner,
                                   slot.header.layout, slot.header.common_bytes};
  numbers.insert(numbers.end(), slot.own_bytes.begin(), slot.own_bytes.end());
  return text_of(numbers);
}

WholeSlot described(const std::string& text) {
  const std::vector<uint64_t> numbers = numbers_in(text);
  if (numbers.size() < 6) throw Error("a machine sent an invalid description of its checkpoint in memory");
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
  machines_ = first_ranks_;
  std::sort(machines_.begin(), machines_.end());
  machines_.erase(std::unique(machines_.begin(), machines_.end()), machines_.end());
  const int mine = first_ranks_[static_cast<size_t>(rank)];
  const std::vector<int> here = ranks_of(mine);
  std::vector<int> elsewhere;
  for (size_t i = 0; i < first_ranks_.size(); ++i)
    if (first_ranks_[i] != mine) elsewhere.push_back(static_cast<int>(i));
  several_ = !elsewhere.empty();
  ranks_here_ = static_cast<int>(here.size());
  rank_here_ = static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());
  const auto number_here = static_cast<size_t>(rank_here_);
  for (size_t i = number_here; i < elsewhere.size(); i += here.size()) kept_.push_back(elsewhere[i]);
  if (!several_) return;
  const auto number = static_cast<size_t>(std::find(machines_.begin(), machines_.end(), mine) - machines_.begin());
  const std::vector<int> before = ranks_of(machines_[(number + machines_.size() - 1) % machines_.size()]);
  const std::vector<int> next = ranks_of(machines_[(number + 1) % machines_.size()]);
  for (size_t i = number_here; i < before.size(); i += here.size()) sources_.push_back(before[i]);
  destination_ = next[number_here % next.size()];
}

std::vector<int> MemoryMachines::ranks_of(int first_rank) const {
  std::vector<int> ranks;
  for (size_t i = 0; i < first_ranks_.size(); ++i)
    if (first_ranks_[i] == first_rank) ranks.push_back(static_cast<int>(i));
  return ranks;
}

bool MemoryMachines::holds_slices(int on, int rank) const {
  const auto number_of = [&](int of) {
    const auto found = std::find(machines_.begin(), machines_.end(), first_ranks_[static_cast<size_t>(of)]);
    return static_cast<size_t>(found - machines_.begin());
  };
  return number_of(on) == number_of(rank) || number_of(on) == (number_of(rank) + 1) % machines_.size();
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

void MemoryMachines::exchange_slices(const Group& group, const std::vector<at::Tensor>& mine, const ImageSlices& slices,
                                     SlotWriter& writer) const {
  if (!several_ || slices.empty()) return;
  struct Source {
    int rank;
    std::vector<ByteRange> pieces;
    at::Tensor piece;
  };
  std::vector<Source> sources;
  size_t turns = 0;
  for (const int rank : sources_) {
    sources.push_back({rank, pieces_of(slices.of_rank(rank)), at::empty({kSlicePiece}, at::kByte)});
    turns = std::max(turns, sources.back().pieces.size());
  }
  std::vector<at::Tensor> outgoing;
  for (const at::Tensor& slice : mine)
    if (slice.numel() > 0)
      for (const at::Tensor& piece : slice.split(kSlicePiece)) outgoing.push_back(piece);
  for (size_t turn = 0; turn < std::max(turns, outgoing.size()); ++turn) {
    std::vector<std::pair<Work, const Source*>> received;
    for (const Source& source : sources)
      if (turn < source.pieces.size())
        received.emplace_back(
            group.recv_async(source.piece.narrow(0, 0, static_cast<int64_t>(source.pieces[turn].bytes())), source.rank,
                             kSlicesTag),
            &source);
    std::optional<Work> sent;
    if (turn < outgoing.size()) sent = group.send_async(outgoing[turn], destination_, kSlicesTag);
    for (auto& [work, source] : received) {
      work.wait();
      writer.write_common(source->pieces[turn].begin, source->piece.const_data_ptr(), source->pieces[turn].bytes());
    }
    if (sent) sent->wait();
  }
}

void MemoryMachines::keep(const SaveHeader& mine) {
  for (size_t i = 0; i < writers_.size(); ++i) {
    const std::string& told = told_[static_cast<size_t>(kept_[i])];
    SaveHeader header = mine;
    std::memcpy(&header.layout, told.data(), sizeof header.layout);
    const uint64_t own_bytes = told.size() - sizeof header.layout;
    writers_[i].begin();
    writers_[i].write_own(0, told.data() + sizeof header.layout, own_bytes);
    writers_[i].finish(header, own_bytes, holds_slices(rank_, kept_[i]));
  }
  told_.clear();
}

SlotTurn MemoryMachines::agree_on_turn(const Group& group, const SlotMemory& memory) {
  SlotTurn turn = first_turn(memory);
  const std::vector<WholeSlot> whole = whole_slots(memory);
  std::vector<std::vector<HeldState>> all;
  const std::string mine = std::to_string(turn.sequence) + " " + text_of(held_states(whole));
  for (const std::string& said : group.all_gather_bytes(mine)) {
    std::istringstream stream(said);
    uint64_t sequence = 0;
    stream >> sequence;
    turn.sequence = std::max(turn.sequence, sequence);
    all.push_back(states_in(stream));
  }
  // A machine may hold a newer one than can be resumed: that is the one to overwrite.
  const uint64_t spared = newest_resumable(all);
  for (const WholeSlot& slot : whole)
    if (slot.sequence == spared) turn.slot = 1 - slot.slot;
  return turn;
}

std::optional<WholeSlot> MemoryMachines::newest_for_all(const Group& group, SlotMemory& memory,
                                                        const std::vector<WholeSlot>& mine) const {
  const auto said = group.all_gather_bytes(text_of(held_states(mine)));
  std::vector<std::vector<HeldState>> all;
  for (const int leader : machines_) {
    std::istringstream stream(said[static_cast<size_t>(leader)]);
    all.push_back(states_in(stream));
  }
  const uint64_t newest = newest_resumable(all);
  if (newest == 0) {
    const bool any = std::any_of(all.begin(), all.end(), [](const auto& states) { return !states.empty(); });
    if (any && rank_ == 0) {
      TORCH_WARN(
          "the checkpoints in memory cannot be used: some of their slices were on machines that are gone, as after the "
          "the "
          "loss of two neighbours");
    }
    return {};
  }
  WholeSlot chosen;
  for (const WholeSlot& slot : mine)
    if (slot.sequence == newest) chosen = slot;
  std::string lacking;
  int holder = -1;
  bool receives = false;
  for (size_t i = 0; i < machines_.size(); ++i) {
    if (has(all[i], newest)) {
      if (holder < 0) holder = machines_[i];
      continue;
    }
    lacking += (lacking.empty() ? "" : ", ") + std::to_string(machines_[i]);
    receives = receives || machines_[i] == rank_;
  }
  if (lacking.empty()) return chosen;
  const std::string problem = send(group, memory, holder, receives, chosen);
  if (rank_ == 0) {
    TORCH_WARN("the machines of ranks ", lacking, " do not have the checkpoint in memory of step ", chosen.header.step,
               problem.empty() ? "; that of rank " + std::to_string(holder) + " has sent it to them"
                               : " and could not receive it, so it is not used: " + problem);
  }
  if (!problem.empty()) return {};
  return chosen;
}

/// The machine of `root` sends its `slot` to the machines whose leader receives. Returns the error.
/// REQUIRES: all ranks call it.
std::string MemoryMachines::send(const Group& group, SlotMemory& memory, int root, bool receives,
                                 WholeSlot& slot) const {
  const int from = slot.slot;
  std::string problem, told;
  if (rank_ == root) problem = failure_of([&] { told = SlotReader(memory, slot.header.owner).slices(slot).encode(); });
  slot = described(group.broadcast_bytes(rank_ == root ? describe(slot) : "", root));
  const auto plain = ImageSlices::decode(group.broadcast_bytes(told, root)).plain(slot.header.common_bytes);
  const uint64_t bytes = std::accumulate(slot.own_bytes.begin(), slot.own_bytes.end(), bytes_in(plain));
  std::vector<SlotWriter> writers;
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
  for (const ByteRange& range : plain)
    copy(StateMemory::common_at(from) + range.begin, StateMemory::common_at(slot.slot) + range.begin, range.bytes());
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
  const bool has_slices = slot.header.common_bytes != bytes_in(plain);
  for (size_t rank = 0; rank < writers.size(); ++rank)
    writers[rank].finish(slot.header, slot.own_bytes[rank], /*sliced=*/!has_slices);
  group.barrier();  // nobody reads it before
  if (!receives) slot.slot = from;
  return "";
}

}  // namespace lockstep
