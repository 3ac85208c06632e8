#include "checkpoint/memory_tier.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "base/environment.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/huge_pages.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"
#include "checkpoint/accumulation.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/memory/slot_source.h"
#include "checkpoint/memory_agreement.h"
#include "checkpoint/object_reader.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

using MemoryDict = c10::impl::GenericDict;
using Outcome = CheckpointMessage::Outcome;
using Scope = Checkpointer::Scope;

constexpr auto kNoChecksums = ZipWriter::Checksums::kWholeEntries;
constexpr std::chrono::milliseconds kForHugePages(500);  // of the tensors, once
constexpr std::chrono::seconds kLongestWait(300);        // where collectives have no timeout of their own

std::atomic<bool> in_use = false;  // one tier a process: its states lie in one place

int number_in(const std::optional<std::string>& text) {
  int value = -1;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

std::string in_mebibytes(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

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
    throw Error("the group is not that of all ranks of the launcher; give the Checkpointer the group of the Context");
  return std::make_unique<MappedSlots>(fd);
}

uint64_t owner_of(const std::string& folder) {
  Hash hash;
  hash.add(folder);
  return hash.value();
}

struct SplitState {
  MemoryDict common = new_dict(), own = new_dict();
};

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
  for (const MemoryDict& part : {state.common, own_state, rank_zero}) check_own_weights(part);
  return state;
}

/// Counts, and passes on what lies in [begin, end).
class RangeSink : public ByteSink {
 public:
  using Take = void (SlotWriter::*)(uint64_t at, const void* data, uint64_t bytes);
  RangeSink() = default;
  RangeSink(SlotWriter& writer, Take taking, uint64_t begin, uint64_t end)
      : writer_(&writer), take_(taking), begin_(begin), end_(end) {}
  /// Puts what it passes on into huge pages first: a copy of it is then a quarter faster.
  void gather_until(Deadline deadline) { gather_until_ = deadline; }

  void write(const void* data, size_t size) override {
    const uint64_t from = std::max(position_, begin_), to = std::min(position_ + size, end_);
    if (from < to) take(from, static_cast<const char*>(data) + (from - position_), to - from);
    position_ += size;
  }
  uint64_t position() const { return position_; }

 private:
  void take(uint64_t at, const char* data, uint64_t bytes) {
    if (gather_until_) gather_into_huge_pages(data, bytes, *gather_until_);
    (writer_->*take_)(at, data, bytes);
  }

  SlotWriter* const writer_ = nullptr;
  const Take take_ = nullptr;
  const uint64_t begin_ = 0, end_ = 0;
  uint64_t position_ = 0;
  std::optional<Deadline> gather_until_;
};

uint64_t bytes_in_memory(const ObjectWriter& object) {
  RangeSink sink;
  object.write(sink, "state", kNoChecksums);
  return sink.position();
}

/// Room for pickles that grow with the numbers in them.
uint64_t with_room(uint64_t bytes) { return (bytes + bytes / 64 + (64 << 10)) / 4096 * 4096; }

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
      throw Error("another Checkpointer of this process saves to memory; let one do it");
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
      throw Error(text + ". With disk_if_no_memory = true checkpoints are then saved to disk alone");
    if (group.rank() == 0) {
      TORCH_WARN(text, ". Checkpoints are saved to disk alone");
    }
    return nullptr;
  }
  return std::unique_ptr<MemoryTier>(new MemoryTier(
      std::move(memory), MemoryMachines(std::move(first_ranks), group.rank()), folder, group, options));
}

MemoryTier::MemoryTier(std::unique_ptr<MappedSlots> memory, MemoryMachines machines, const std::string& folder,
                       const Group& group, const CheckpointerOptions& options)
    : group_(group),
      memory_(std::move(memory)),
      machines_(std::move(machines)),
      folder_(folder),
      owner_(owner_of(folder)),
      every_(*options.memory_every_n_steps),
      may_give_up_(options.disk_if_no_memory) {}

MemoryTier::~MemoryTier() { in_use = false; }

void MemoryTier::save(const std::vector<CheckpointPart>& parts, int64_t step, std::string problem) {
  SplitState state;
  std::optional<ObjectWriter> written_by_all, written_here;
  Hash hash;
  if (problem.empty())
    problem = failure_of([&] {
      state = split_state(parts, step, group_);
      written_by_all.emplace(state.common);
      written_here.emplace(state.own);
      hash.add(written_by_all->pickle());
    });
  const uint64_t layout = hash.value();
  MemorySaveComparison comparison(group_, {.step = step,
                                           .folder = folder_,
                                           .layout = layout,
                                           .common = &state.common,
                                           .sampled = written_by_all && writer_ ? &*written_by_all : nullptr,
                                           .problem = std::move(problem)});
  // Where nothing remains to be agreed on, the ranks' messages travel while the state is written.
  const bool writes_at_once = written_here && writer_ && !machines_.several() &&
                              written_by_all->most_bytes() <= common_capacity_ &&
                              written_here->most_bytes() <= own_capacity_;
  if (!writes_at_once) comparison.check();
  last_step_ = step;
  const ObjectWriter &common = *written_by_all, &own = *written_here;
  // Where there is room for certain, nothing is counted beforehand: that takes as long as writing hundreds of headers.
  if ((!writer_ || common.most_bytes() > common_capacity_) && !has_room(state.common, common, own)) return;
  if (own.most_bytes() > own_capacity_) open_own_windows(own.most_bytes());
  machines_.exchange(group_, own, layout);
  wait_for_last_save(step);
  writer_->begin();
  RangeSink range(*writer_, &SlotWriter::write_common, begin_, end_);
  if (!std::exchange(gathered_, true)) range.gather_until(Deadline(kForHugePages));
  common.write(range, "state", kNoChecksums);
  RangeSink all(*writer_, &SlotWriter::write_own, 0, own_capacity_);
  own.write(all, "state", kNoChecksums);
  comparison.check();
  const SaveHeader header{.step = step, .owner = owner_, .layout = layout, .common_bytes = range.position()};
  writer_->finish(header, all.position());
  machines_.keep(header);
  own_page().note_memory_checkpoint(step);
}

/// All ranks call it. False: the program does without.
bool MemoryTier::has_room(const MemoryDict& state, const ObjectWriter& common, const ObjectWriter& own) {
  const uint64_t common_bytes = bytes_in_memory(common);
  return (writer_ && common_bytes <= common_capacity_) || reserve(state, common_bytes, own.most_bytes());
}

/// All ranks call it: makes room for images of this size, and in the first save compares what should be equal. False if
/// there is no room and the program may do without.
bool MemoryTier::reserve(const MemoryDict& common, uint64_t common_bytes, uint64_t own_bytes) {
  CheckpointMessage room = share(
      [&](CheckpointMessage& mine) {
        mine.text = std::to_string(common_bytes);
        mine.state = std::to_string(own_bytes);
        mine.steps = static_cast<int64_t>(available_memory_bytes() + memory_->committed_bytes());
      },
      [&](const std::vector<CheckpointMessage>& ranks) { check_room(ranks); });
  if (room.outcome == Outcome::kDone)
    room = share([&](CheckpointMessage&) { open_windows(common_bytes, own_bytes); }, [](const auto&) {});
  if (room.outcome == Outcome::kFailed) {
    if (!may_give_up_)
      throw LimitError("no checkpoint in memory: " + room.text +
                       ". Raise the limit, use fewer ranks, or save to disk alone (disk_if_no_memory = true)");
    if (group_.rank() == 0) {
      TORCH_WARN("no checkpoints in memory: ", room.text, ". Checkpoints are saved to disk alone");
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

/// All ranks say something, rank 0 looks at it; all get what failed, if something did.
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

/// Rank 0. Throws LimitError with what is wanted and what there is.
void MemoryTier::check_room(const std::vector<CheckpointMessage>& ranks) const {
  uint64_t wanted = 0;
  for (const CheckpointMessage& rank : ranks) {
    const auto common = std::strtoull(rank.text.c_str(), nullptr, 10);
    wanted = std::max<uint64_t>(wanted, 2 * with_room(common));
  }
  auto available = static_cast<uint64_t>(ranks[0].steps);  // on the machine that has least
  for (const CheckpointMessage& rank : ranks) {
    wanted += 2 * with_room(std::strtoull(rank.state.c_str(), nullptr, 10));
    available = std::min(available, static_cast<uint64_t>(rank.steps));
  }
  if (wanted > available)
    throw LimitError("two states in memory take " + in_mebibytes(wanted) + ", but only " + in_mebibytes(available) +
                     " are available");
}

void MemoryTier::open_windows(uint64_t common_bytes, uint64_t own_bytes) {
  constexpr uint64_t kLine = 64;
  const auto rank = static_cast<uint64_t>(machines_.rank_here()), ranks = static_cast<uint64_t>(machines_.ranks_here());
  common_capacity_ = with_room(common_bytes);
  const auto bound = [&](uint64_t of) {
    return of == ranks ? common_capacity_ : common_bytes * of / ranks / kLine * kLine;
  };
  begin_ = bound(rank);
  end_ = bound(rank + 1);
  memory_->open_window(MappedSlots::kCommon0, StateMemory::common_at(0) + begin_, end_ - begin_);
  memory_->open_window(MappedSlots::kCommon1, StateMemory::common_at(1) + begin_, end_ - begin_);
  open_own_windows(own_bytes);
}

void MemoryTier::open_own_windows(uint64_t own_bytes) {
  if (own_bytes > StateMemory::kOwnBytes)
    throw LimitError("what rank " + std::to_string(group_.rank()) + " has of its own takes " + in_mebibytes(own_bytes) +
                     ", and there are addresses for " + in_mebibytes(StateMemory::kOwnBytes));
  own_capacity_ = std::min(with_room(own_bytes), StateMemory::kOwnBytes);
  memory_->open_window(MappedSlots::kOwn0, StateMemory::own_at(0, group_.rank()), own_capacity_);
  memory_->open_window(MappedSlots::kOwn1, StateMemory::own_at(1, group_.rank()), own_capacity_);
}

/// Usually they have all saved long ago, or this rank would not have got here.
void MemoryTier::wait_for_last_save(int64_t step) const {
  const auto timeout = own_page().collective_timeout();
  const Deadline deadline(timeout.count() > 0 ? timeout : std::chrono::milliseconds(kLongestWait));
  int turns = 0;
  for (int rank = writer_->unfinished_rank(); rank >= 0; rank = writer_->unfinished_rank()) {
    if (deadline.passed())
      throw Error("the checkpoint in memory of step " + std::to_string(step) + " cannot be saved: rank " +
                  std::to_string(rank) + " has not saved the one before; all ranks must call step() for each step");
    if (++turns > 100) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

std::optional<WholeSlot> MemoryTier::newest_intact() const {
  if (machines_.several())
    return machines_.newest_for_all(group_, *memory_, machines_.leads() ? intact_slots(2) : std::vector<WholeSlot>());
  const auto slots = group_.rank() == 0 ? intact_slots(1) : std::vector<WholeSlot>();
  return slots.empty() ? std::nullopt : std::optional(slots[0]);
}

std::vector<WholeSlot> MemoryTier::intact_slots(size_t most) const {
  std::vector<WholeSlot> intact;
  for (WholeSlot& slot : whole_slots(*memory_)) {
    if (slot.header.owner != owner_ || intact.size() == most) continue;
    const std::string problem = problem_of(slot);
    if (problem.empty())
      intact.push_back(std::move(slot));
    else
      TORCH_WARN("the checkpoint in memory of step ", slot.header.step, " is left out: ", problem);
  }
  return intact;
}

std::string MemoryTier::problem_of(const WholeSlot& slot) const {
  return failure_of([&] {
    const auto look_at = [&](const std::string& name, uint64_t offset, uint64_t bytes) {
      const SlotSource source(name, *memory_, offset, bytes);
      const PtFile file(source);
    };
    look_at("what ranks have in common", StateMemory::common_at(slot.slot), slot.header.common_bytes);
    for (int rank = 0; rank < slot.world_size(); ++rank)
      look_at("what rank " + std::to_string(rank) + " had", StateMemory::own_at(slot.slot, rank),
              slot.own_bytes[static_cast<size_t>(rank)]);
  });
}

CheckpointImage MemoryTier::image(uint64_t sequence) const {
  std::optional<WholeSlot> whole;
  for (WholeSlot& slot : whole_slots(*memory_))
    if (slot.sequence == sequence) whole = std::move(slot);
  if (!whole) throw RefusedInput("the checkpoint in memory is gone");
  const auto read = [this](uint64_t offset, uint64_t bytes) {
    const SlotSource source("the checkpoint in memory", *memory_, offset, bytes);
    return ObjectReader(source).object().toGenericDict();
  };
  const auto own = [read, whole](size_t rank) {
    return read(StateMemory::own_at(whole->slot, static_cast<int>(rank)), whole->own_bytes.at(rank));
  };
  CheckpointImage image;
  image.whole = read(StateMemory::common_at(whole->slot), whole->header.common_bytes);
  image.ranks = whole->own_bytes.size();
  image.state_of_rank = [own](size_t rank) { return own(rank).at(kRanksKey).toGenericDict(); };
  const MemoryDict from_rank_zero = own(0).at(kRankZeroKey).toGenericDict();
  for (const auto& part : from_rank_zero) {
    if (!image.whole.contains(part.key())) {
      image.whole.insert(part.key(), part.value());
      continue;
    }
    MemoryDict model = image.whole.at(part.key()).toGenericDict();  // its parameters; this has the rest
    for (const auto& item : part.value().toGenericDict()) model.insert(item.key(), item.value());
  }
  return image;
}

}  // namespace lockstep
