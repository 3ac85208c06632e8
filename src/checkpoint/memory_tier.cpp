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
#include "checkpoint/memory/state_keys.h"
#include "checkpoint/memory_agreement.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

using MemoryDict = c10::impl::GenericDict;
using Outcome = CheckpointMessage::Outcome;
using Scope = Checkpointer::Scope;

constexpr auto kNoChecksums = ZipWriter::Checksums::kWholeEntries;
constexpr std::chrono::milliseconds kForHugePages(500);  // for the tensors, once
constexpr std::chrono::seconds kLongestWait(300);        // if collectives have no timeout of their own

std::atomic<bool> in_use = false;  // one tier per process: its states have one place

int number_in(const std::optional<std::string>& text) {
  int value = -1;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

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
  check_shared_weights();
  for (const MemoryDict& part : {state.common, own_state, rank_zero}) check_own_weights(part);
  return state;
}

/// Counts bytes, and passes on those in [begin, end).
class RangeSink : public ByteSink {
 public:
  using Take = void (SlotWriter::*)(uint64_t at, const void* data, uint64_t bytes);
  RangeSink() = default;
  RangeSink(SlotWriter& writer, Take taking, uint64_t begin, uint64_t end)
      : writer_(&writer), take_(taking), begin_(begin), end_(end) {}
  /// First moves forwarded memory into huge pages, which makes copying it a quarter faster.
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
      room_(*memory_, group.rank(), machines_.rank_here(), machines_.ranks_here()) {}

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
  // If nothing remains to be agreed on, the ranks' messages are in flight while the state is written.
  const bool writes_at_once = written_here && writer_ && !machines_.several() &&
                              written_by_all->most_bytes() <= room_.common_capacity() &&
                              written_here->most_bytes() <= room_.own_capacity();
  if (!writes_at_once) comparison.check();
  last_step_ = step;
  const ObjectWriter &common = *written_by_all, &own = *written_here;
  // If there is certainly room, nothing is counted beforehand, which would take as long as writing hundreds of headers.
  if ((!writer_ || common.most_bytes() > room_.common_capacity()) && !has_room(state.common, common, own)) return;
  if (own.most_bytes() > room_.own_capacity()) room_.open_own(own.most_bytes());
  machines_.exchange(group_, own, layout);
  wait_for_last_save(step);
  writer_->begin();
  RangeSink range(*writer_, &SlotWriter::write_common, room_.begin(), room_.end());
  if (!std::exchange(gathered_, true)) range.gather_until(Deadline(kForHugePages));
  common.write(range, "state", kNoChecksums);
  RangeSink all(*writer_, &SlotWriter::write_own, 0, room_.own_capacity());
  own.write(all, "state", kNoChecksums);
  comparison.check();
  const SaveHeader header{.step = step, .owner = owner_, .layout = layout, .common_bytes = range.position()};
  writer_->finish(header, all.position());
  machines_.keep(header);
  own_page().note_memory_checkpoint(step);
}

/// Returns false if the program continues without the tier.
/// REQUIRES: all ranks call it.
bool MemoryTier::has_room(const MemoryDict& state, const ObjectWriter& common, const ObjectWriter& own) {
  const uint64_t common_bytes = bytes_in_memory(common);
  return (writer_ && common_bytes <= room_.common_capacity()) || reserve(state, common_bytes, own.most_bytes());
}

/// Makes room for images of this size, and in the first save compares what should be equal. Returns false if there is
/// no room and the program may continue without it.
/// REQUIRES: all ranks call it.
bool MemoryTier::reserve(const MemoryDict& common, uint64_t common_bytes, uint64_t own_bytes) {
  CheckpointMessage result =
      share([&](CheckpointMessage& mine) { room_.ask(mine, common_bytes, own_bytes); }, MemoryRoom::check);
  if (result.outcome == Outcome::kDone)
    result = share([&](CheckpointMessage&) { room_.open(common_bytes, own_bytes); }, [](const auto&) {});
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
                  std::to_string(rank) + " has not saved the one before; all ranks must call step() for each step");
    if (++turns > 100) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

std::optional<WholeSlot> MemoryTier::newest_intact() const {
  const SlotReader reader(*memory_, owner_);
  if (machines_.several())
    return machines_.newest_for_all(group_, *memory_, machines_.leads() ? reader.intact(2) : std::vector<WholeSlot>());
  const auto slots = group_.rank() == 0 ? reader.intact(1) : std::vector<WholeSlot>();
  return slots.empty() ? std::nullopt : std::optional(slots[0]);
}

}  // namespace lockstep
