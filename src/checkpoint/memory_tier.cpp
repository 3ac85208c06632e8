#include "checkpoint/memory_tier.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include <ATen/ATen.h>

#include "base/clock.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/huge_pages.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"
#include "base/text.h"
#include "checkpoint/accumulation.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/memory/kept_state.h"
#include "checkpoint/memory_agreement.h"
#include "checkpoint/memory_bringer.h"
#include "checkpoint/sliced_memory.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"

namespace lockstep {

using MemoryDict = c10::impl::GenericDict;

struct SplitState {
  MemoryDict common = new_dict(), own = new_dict();
};

namespace {

using Outcome = CheckpointMessage::Outcome;
using Scope = Checkpointer::Scope;

constexpr auto kNoChecksums = ZipWriter::Checksums::kWholeEntries;
constexpr std::chrono::milliseconds kForHugePages(500);  // for the tensors, once
constexpr std::chrono::seconds kLongestWait(300);        // if collectives have no timeout of their own

std::atomic<bool> in_use = false;  // one tier per process: its states have one place

/// This rank's access to its launcher's memory. Throws Error.
std::unique_ptr<MappedSlots> open_memory(const Group& group) {
  const Environment environment = Environment::from_process();
  const int fd = number_in(environment.lockstep_memory_fd);
  if (!StateMemory::is(fd))
    throw Error(
        "no launcher holds memory for the states of this rank; start the program by `lockstep run`, or alone "
        "with --ranks, without a limit on the size of files (ulimit -f)");
  if (number_in(environment.rank) != group.rank() || number_in(environment.world_size) != group.world_size() ||
      group.world_size() > StateMemory::kMaxRanks)
    throw Error(
        "the group does not contain all ranks that the launcher started; give the Checkpointer the group of the "
        "Context");
  return std::make_unique<MappedSlots>(fd);
}

uint64_t owner_of(const std::string& folder) {
  Hash hash;
  hash.add(folder);
  return hash.value();
}

std::optional<c10::IValue> value_in_slices(const CheckpointPart& part, const Group& group) {
  if (part.scope == Scope::kEachRank || !part.lies_in_slices() || !part.save_in_slices) return {};
  return part.save_in_slices(group);
}

SplitState split_state(const std::vector<CheckpointPart>& parts, int64_t step, const Group& group) {
  const bool is_main = group.rank() == 0;
  const VirtualRanks* virtual_ranks = state_of(group).virtual_ranks.get();
  SplitState state;
  MemoryDict rank_zero = new_dict();
  for (const CheckpointPart& part : parts) {
    if (part.replicas != nullptr) {
      MemoryDict shared = new_dict(), rest = new_dict();
      for (const auto& item : part.replicas->named_parameters())
        (part.ignored.contains(item.key()) ? rest : shared).insert(item.key(), item.value());
      for (const auto& item : part.replicas->named_buffers()) rest.insert(item.key(), item.value());
      state.common.insert(part.name, shared);
      if (is_main) rank_zero.insert(part.name, rest);
    } else if (const auto in_slices = value_in_slices(part, group)) {
      state.common.insert(part.name, *in_slices);
    } else if (part.scope == Scope::kAllRanks) {
      state.common.insert(part.name, part.part.save());
    } else if (part.scope == Scope::kRankZero && is_main) {
      rank_zero.insert(part.name, part.part.save());
    }
  }
  insert_step(state.common, step, virtual_ranks);
  insert_accumulation(state.common, parts, group);
  const MemoryDict own_state = state_of_rank(parts, virtual_ranks);
  state.own.insert(kRanksKey, own_state);
  state.own.insert(kRankZeroKey, rank_zero);
  check_shared_weights();
  for (const MemoryDict& part : {state.common, own_state, rank_zero}) check_own_weights(part);
  return state;
}

/// Counts, and passes on what lies in these ranges, which ascend.
class RangeSink : public ByteSink {
 public:
  using Take = void (SlotWriter::*)(uint64_t at, const void* data, uint64_t bytes);
  RangeSink() = default;
  RangeSink(SlotWriter& writer, Take taking, std::vector<ByteRange> ranges)
      : writer_(&writer), take_(taking), ranges_(std::move(ranges)) {}
  /// Moves forwarded memory into huge pages first: a copy of it is then a quarter faster.
  void gather_until(Deadline deadline) { gather_until_ = deadline; }

  void write(const void* data, size_t size) override {
    const uint64_t begin = position_;
    position_ += size;
    for (; next_ < ranges_.size() && ranges_[next_].begin < position_; ++next_) {
      const uint64_t from = std::max(begin, ranges_[next_].begin), to = std::min(position_, ranges_[next_].end);
      if (from < to) take(from, static_cast<const char*>(data) + (from - begin), to - from);
      if (ranges_[next_].end > position_) break;
    }
  }
  uint64_t position() const { return position_; }

 private:
  void take(uint64_t at, const char* data, uint64_t bytes) {
    if (gather_until_) gather_into_huge_pages(data, bytes, *gather_until_);
    (writer_->*take_)(at, data, bytes);
  }

  SlotWriter* const writer_ = nullptr;
  const Take take_ = nullptr;
  const std::vector<ByteRange> ranges_;
  size_t next_ = 0;
  uint64_t position_ = 0;
  std::optional<Deadline> gather_until_;
};

uint64_t bytes_in_memory(const ObjectWriter& object) {
  RangeSink sink;
  object.write(sink, "state", kNoChecksums);
  return sink.position();
}

}  // namespace

std::unique_ptr<MemoryTier> MemoryTier::make(const std::string& folder, const Group& group,
                                             const CheckpointerOptions& options) {
  if (!options.memory_every_n_steps) return nullptr;
  std::unique_ptr<MappedSlots> memory;
  int first_rank = 0;  // of this machine
  const std::string problem = failure_of([&] {
    memory = open_memory(group);
    first_rank = group.rank() - std::max(0, number_in(Environment::from_process().local_rank));
    if (in_use.exchange(true)) {
      memory.reset();
      throw Error("another Checkpointer of this process already saves to memory, and only one may");
    }
  });
  const auto said = group.all_gather_bytes(std::to_string(first_rank) + " " + problem);
  std::vector<int> first_ranks;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    first_ranks.push_back(std::atoi(said[rank].c_str()));
    const std::string its = said[rank].substr(said[rank].find(' ') + 1);
    if (its.empty()) continue;
    if (memory) in_use = false;
    const std::string text = "memory_every_n_steps: rank " + std::to_string(rank) + " cannot save to memory: " + its;
    if (!options.disk_if_no_memory)
      throw Error(text + ". To save to disk alone in this case, set disk_if_no_memory = true");
    if (group.rank() == 0) {
      TORCH_WARN(text, ". Checkpoints are saved to disk alone");
    }
    return nullptr;
  }
  return std::unique_ptr<MemoryTier>(
      new MemoryTier(std::move(memory), MemoryMachines(std::move(first_ranks), group.rank()), folder, group, options));
}

MemoryTier::MemoryTier(std::unique_ptr<MappedSlots> memory, MemoryMachines machines, const std::string& folder,
                       const Group& group, const CheckpointerOptions& options)
    : group_(group),
      memory_(std::move(memory)),
      machines_(std::move(machines)),
      folder_(folder),
      owner_(owner_of(folder)),
      every_(*options.memory_every_n_steps),
      may_give_up_(options.disk_if_no_memory),
      room_(*memory_, group.rank(), machines_) {}

MemoryTier::~MemoryTier() { in_use = false; }

/// The state that a rank is about to save.
struct MemoryTier::Saved {
  Saved(const std::vector<CheckpointPart>& parts, int64_t step, const Group& group)
      : state(split_state(parts, step, group)), common(state.common) {
    if (!common.sliced().empty()) slices = common.places_of_sliced("state", kNoChecksums);
    if (!slices.empty() && group.rank() == 0) state.own.insert(kSlicesKey, slices.encode());
    own.emplace(state.own);
    Hash hash;
    hash.add(common.pickle());
    if (!slices.empty()) hash.add(slices.encode());
    layout = hash.value();
  }
  /// This rank's slices, as ImageSlices::of_rank() orders them.
  std::vector<at::Tensor> slices_here() const {
    std::vector<at::Tensor> tensors;
    for (const c10::Storage& storage : common.sliced()) {
      const Slices& of = *slices_of(storage);
      tensors.push_back(at::empty({0}, at::kByte));
      tensors.back().set_(storage, static_cast<int64_t>(of.begin()), {static_cast<int64_t>(of.bytes)}, {1});
    }
    return tensors;
  }

  SplitState state;
  ObjectWriter common;
  ImageSlices slices;  ///< of the common image
  std::optional<ObjectWriter> own;
  uint64_t layout = 0;
};

void MemoryTier::save(const std::vector<CheckpointPart>& parts, int64_t step, std::string problem) {
  std::optional<Saved> saved;
  if (problem.empty()) problem = failure_of([&] { saved.emplace(parts, step, group_); });
  const bool fits = saved && writer_ && room_.has_room(saved->common.most_bytes(), saved->slices);
  MemorySaveComparison comparison(group_, {.step = step,
                                           .folder = folder_,
                                           .layout = saved ? saved->layout : 0,
                                           .common = saved ? &saved->state.common : nullptr,
                                           .sampled = saved && writer_ ? &saved->common : nullptr,
                                           .problem = std::move(problem)});
  // Where nothing remains to be agreed on, the ranks' messages travel while the state is written.
  const bool writes_at_once = fits && !machines_.several() && saved->own->most_bytes() <= room_.own_capacity();
  if (!writes_at_once) comparison.check();
  last_step_ = step;
  const ObjectWriter &common = saved->common, &own = *saved->own;
  // If there is certainly room, nothing is counted beforehand: that takes as long as writing hundreds of headers.
  if (!fits && !has_room(*saved)) return;
  if (own.most_bytes() > room_.own_capacity()) room_.open_own(own.most_bytes());
  machines_.exchange(group_, own, saved->layout);
  wait_for_last_save(step);
  begin(saved->slices);
  RangeSink range(*writer_, &SlotWriter::write_common, room_.share(saved->slices));
  if (!std::exchange(gathered_, true)) range.gather_until(Deadline(kForHugePages));
  common.write(range, "state", kNoChecksums);
  machines_.exchange_slices(group_, saved->slices_here(), saved->slices, *writer_);
  RangeSink all(*writer_, &SlotWriter::write_own, {{0, room_.own_capacity()}});
  own.write(all, "state", kNoChecksums);
  comparison.check();
  const SaveHeader header{.step = step, .owner = owner_, .layout = saved->layout, .common_bytes = range.position()};
  writer_->finish(header, all.position());
  machines_.keep(header);
  own_page().note_memory_checkpoint(step);
}

void MemoryTier::begin(const ImageSlices& slices) {
  writer_->begin();
  const int slot = writer_->slot();
  // An earlier start may have had other machines, whose slices nobody needs any more.
  if (machines_.rank_here() == 0 && !std::exchange(released_[static_cast<size_t>(slot)], true))
    room_.release_others(slot, slices);
}

/// All ranks call it. False: the program does without.
bool MemoryTier::has_room(const Saved& saved) {
  const uint64_t common_bytes = bytes_in_memory(saved.common);
  if (writer_ && room_.has_room(common_bytes, saved.slices)) return true;
  return reserve(saved.state.common,
                 {.common_bytes = common_bytes, .own_bytes = saved.own->most_bytes(), .slices = saved.slices});
}

/// All ranks call it: makes room for images of this size, and in the first save compares what should be equal. False if
/// there is no room and the program may do without.
bool MemoryTier::reserve(const MemoryDict& common, const MemoryRoom::Sizes& sizes) {
  CheckpointMessage result = share([&](CheckpointMessage& mine) { room_.ask(mine, sizes); },
                                   [&](const auto& ranks) { MemoryRoom::check(ranks, machines_); });
  if (result.outcome == Outcome::kDone)
    result = share([&](CheckpointMessage&) { room_.open(sizes); }, [](const auto&) {});
  released_ = {};
  if (result.outcome == Outcome::kFailed) {
    if (!may_give_up_)
      throw LimitError("no checkpoint in memory: " + result.text +
                       ". Raise the limit, use fewer ranks, or save to disk alone (disk_if_no_memory = true)");
    if (group_.rank() == 0) {
      TORCH_WARN("no checkpoints in memory: ", result.text, ". Checkpoints are saved to disk alone");
    }
    gave_up_ = true;
    return false;
  }
  if (writer_) return true;
  compare_memory_states(group_, common);
  const SlotTurn turn = MemoryMachines::agree_on_turn(group_, *memory_);
  if (machines_.leads()) note_place(*memory_, owner_, std::filesystem::absolute(folder_).lexically_normal().string());
  writer_.emplace(*memory_, group_.rank(), group_.world_size(), turn);
  machines_.begin_keeping(*memory_, turn);
  return true;
}

/// All ranks call `say`, and rank 0 calls `look` on their messages; all get the failure, if any.
CheckpointMessage MemoryTier::share(const std::function<void(CheckpointMessage&)>& say,
                                    const std::function<void(const std::vector<CheckpointMessage>&)>& look) const {
  const auto sent = group_.gather_bytes(attempt(say).encode());
  CheckpointMessage result;
  if (group_.rank() == 0)
    result = attempt([&](CheckpointMessage&) {
      std::vector<CheckpointMessage> ranks;
      for (const std::string& bytes : sent) {
        ranks.push_back(CheckpointMessage::decode(bytes, static_cast<int>(ranks.size())));
        if (ranks.back().outcome == Outcome::kFailed) throw Error(ranks.back().text);
      }
      look(ranks);
    });
  return CheckpointMessage::decode(group_.broadcast_bytes(result.encode()), 0);
}

/// Usually all have saved long ago, or this rank would not have got here.
void MemoryTier::wait_for_last_save(int64_t step) const {
  const auto timeout = own_page().collective_timeout();
  const Deadline deadline(timeout.count() > 0 ? timeout : std::chrono::milliseconds(kLongestWait));
  int turns = 0;
  for (int rank = writer_->unfinished_rank(); rank >= 0; rank = writer_->unfinished_rank()) {
    if (deadline.passed())
      throw Error("the checkpoint in memory of step " + std::to_string(step) + " cannot be saved: rank " +
                  std::to_string(rank) + " has not saved the previous one; every rank must call step() for each step");
    if (++turns > 100) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

std::optional<WholeSlot> MemoryTier::newest_intact() const {
  const SlotReader reader(*memory_, owner_);
  const auto mine = machines_.leads() ? reader.intact(2) : std::vector<WholeSlot>();
  return machines_.newest_for_all(group_, *memory_, mine);
}

CheckpointImage MemoryTier::image(uint64_t sequence, const std::vector<CheckpointPart>& parts) const {
  const auto is_partial = [&](const std::string& name) {
    return std::any_of(parts.begin(), parts.end(), [&](const CheckpointPart& part) {
      return part.name == name && part.lies_in_slices() && part.elements_to_load;
    });
  };
  OpenSlot open;
  std::vector<ByteRange> ranges;
  std::string problem = failure_of([&] {
    open = SlotReader(*memory_, owner_).open(sequence, is_partial);
    ranges = ranges_to_load(parts, open);
  });
  bring_ranges(group_, *memory_, open, ranges, std::move(problem));
  return std::move(open.image);
}

}  // namespace lockstep
