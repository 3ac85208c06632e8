#include "collectives/shm/group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/interruption.h"
#include "rank_page/operation_label.h"

// The protocol. Operation s of a rank:
//
//   start     queue it. If there is room (line s mod 32 and the eager area are free everywhere), ANNOUNCE: copy small
//             data in, write the header and offsets into line s, then store its sequence word.
//   arrive    when the line of every other rank holds s: compare headers. A rank that finds a difference declares the
//             verdict; no data has moved yet.
//   move      kInline, kEager: read every package, done.   kInPlace: sum the own slice of all ranks' buffers into all
//             of them, store `reduced`, done when every rank has.   kRounds: see rounds.h.
//             Rounds are numbered over the life of the group. Every rank counts those of every operation, which follow
//             from its lines, so a word means the same to all ranks (a sum in place is one round).
//   finish    store `finished` = s: this rank no longer reads anything of operation s.
//
// Invariants
//   - A word is stored after the data it stands for, and read before that data is used (release, acquire). Words only
//     grow.
//   - A line, an eager range or a chunk is written again only after every reader has passed the operation that used it,
//     as its `finished`, its `drained` or a later announcement (which says how far its rank had finished) shows.
//   - The method of operation s depends on its lines alone, so all ranks choose the same one.
//   - Announcements may run ahead of execution; execution is in order.
//   - No thread waits for a word while it holds something that another rank needs: only sleep() blocks.
//
// Sleeping: a rank sets `awaited` to the ranks it needs, looks once more, and sleeps on its own `bell`. Whoever
// publishes a word looks at the others' `awaited` afterwards. Both sides use sequentially consistent operations, so
// one of them sees the other; if a wake-up is lost all the same, a sleep ends after 10 ms.

namespace lockstep::shm {

Limits Limits::of(int world_size, bool crowded) {
  // Measured with bench_shm_core on 2 ranks: in place beats one shot from 4 KiB on (0.21 us against 0.34), and for
  // private buffers one shot beats slices through chunks (64 KiB: 2.5 us against 3.1; 256 KiB: no difference). For more
  // ranks the limits follow from the traffic, and were not measured.
  const size_t private_one_shot = world_size <= 2 ? size_t{128} << 10 : world_size <= 4 ? size_t{32} << 10 : 8 << 10;
  // Where ranks take turns on their processors, a wait costs more than the bytes it saves.
  return {.one_shot = crowded ? size_t{8} << 10 : size_t{1} << 10,
          .private_one_shot = private_one_shot,
          .eager = size_t{64} << 10};
}

Group::Group(World world, std::shared_ptr<ProgressSet> set, std::optional<Limits> limits)
    : world_(std::move(world)),
      set_(std::move(set)),
      limits_(limits.value_or(Limits::of(world_.size(), !world_.spin()))),
      fork_generation_(lockstep::fork_generation()),
      arena_(std::make_shared<Arena>(world_.shared_segment(world_.rank()), world_.geometry().resident_at())),
      channels_(world_),
      started_(world_.mine().finished.load()),
      finished_(started_),
      rounds_before_(world_.mine().drained.load()),
      eager_(world_.geometry().eager_bytes),
      stuck_search_(world_) {
  finished_by_.fill(finished_);
  set_->add(this);
}

Group::~Group() {
  // A child of fork() does not have the memory, and a mutex that was held at the fork will never be unlocked there.
  if (fork_generation_ != lockstep::fork_generation()) return;
  set_->remove(this);
  leave();
}

void Group::leave() {
  check_process();
  const Lock guard(*this);
  if (left_.exchange(true)) return;
  fail_all("this rank left the group while the operation was pending");
  world_.mine().closed.store(1 + started_);
  world_.notify_all();
  wake_own_sleepers();
}

void Group::lock() {
  if (mutex_.try_lock()) return;
  contenders_.fetch_add(1, std::memory_order_relaxed);
  mutex_.lock();
  contenders_.fetch_sub(1, std::memory_order_relaxed);
}

void Group::check_process() const {
  if (fork_generation_ != lockstep::fork_generation())
    throw Error(
        "this group belongs to the process that made it, not to a child it forked; make another group in the child");
}

void Group::check_member() const {
  check_process();
  if (left_.load(std::memory_order_relaxed)) throw Error("this rank has left the group; make a new one");
}

ReduceFunction Group::prepare(Request& request) const {
  const auto refuse = [&](const std::string& why) { throw Error(Header(request).text() + ": " + why); };
  if (request.count > kMaxCount) refuse("too many elements");
  if (request.root < 0 || request.root >= size())
    refuse("a group of " + std::to_string(size()) + " ranks has no such root");
  const ReduceFunction reduce = is_reduction(request.kind) ? find_reduce(request.type, request.op, size()) : nullptr;
  if (is_reduction(request.kind) && reduce == nullptr)
    refuse(std::string(name(request.op)) + " is not defined for " + name(request.type));
  const auto n = static_cast<size_t>(size());
  if (!request.pieces().inputs.empty() && request.pieces().inputs.size() != n) refuse("needs one input for each rank");
  if (!request.pieces().outputs.empty() && request.pieces().outputs.size() != n)
    refuse("needs one output for each rank");
  if (request.kind == OperationKind::kAllToAllUneven &&
      (request.pieces().send_counts.size() != n || request.pieces().receive_counts.size() != n))
    refuse("needs one count for each rank, in both directions");
  if (request.kind == OperationKind::kBroadcast && request.input == nullptr) request.input = request.output;
  if (request.kind == OperationKind::kAllToAllUneven) {
    request.count = 0;  // counts are compared pairwise
    for (const auto* counts : {&request.pieces().send_counts, &request.pieces().receive_counts})
      if (*std::max_element(counts->begin(), counts->end()) > kMaxCount) refuse("too many elements for one rank");
  }
  return reduce;
}

uint64_t Group::next_sequence() {
  if (started_ == kLastOperation)
    throw Error("rank " + std::to_string(rank()) + ": this group has carried out " + std::to_string(kLastOperation) +
                " operations, the most it can count; make a new group");
  const uint64_t sequence = ++started_;
  if (const std::string_view label = OperationLabel::current(); !label.empty())
    world_.label(rank(), sequence).store(sequence, label);
  return sequence;
}

WorkPtr Group::start(Request request) {
  check_member();
  const ReduceFunction reduce = prepare(request);
  const Lock guard(*this);
  stuck_search_.note_caller();
  auto operation = std::make_shared<Operation>(std::move(request), reduce, rank(), size(), next_sequence());
  queue_.push_back(operation);
  if (!is_over()) progress_locked();
  return operation;
}

WorkPtr Group::send(const void* data, size_t bytes, int to, int64_t tag, std::shared_ptr<void> keep_alive,
                    DataType type) {
  check_member();
  if (to < 0 || to >= size() || to == rank())
    throw Error("send: rank " + std::to_string(to) + " is not another rank of the group");
  const Lock guard(*this);
  stuck_search_.note_caller();
  auto message = channels_.send(data, bytes, to, tag, std::move(keep_alive), type);
  if (!is_over()) progress_locked();
  return message;
}

MessagePtr Group::receive(void* data, size_t bytes, int from, int64_t tag, std::shared_ptr<void> keep_alive,
                          DataType type) {
  check_member();
  if (from != kAnySource && (from < 0 || from >= size() || from == rank()))
    throw Error("receive: rank " + std::to_string(from) + " is not another rank of the group");
  const Lock guard(*this);
  stuck_search_.note_caller();
  auto message = channels_.receive(data, bytes, from, tag, std::move(keep_alive), type);
  if (!is_over()) progress_locked();
  return message;
}

bool Group::progress() {
  check_process();
  const Lock guard(*this);
  return progress_locked();
}

bool Group::try_progress() {
  if (!mutex_.try_lock()) return false;
  const Lock guard(*this, std::adopt_lock);
  return progress_locked();
}

void Group::share_out_by(ShareOut share_out) {
  const Lock guard(*this);
  share_out_ = std::move(share_out);
}

uint64_t Group::waiting_for() {
  const Lock guard(*this);
  return blocked_on_ | blocked_on_any_;
}

void Group::run(Request request, std::chrono::milliseconds timeout) {
  check_member();
  const ReduceFunction reduce = prepare(request);
  Lock guard(*this);
  Operation operation(std::move(request), reduce, rank(), size(), next_sequence());
  // It lives on the stack: it leaves the queue, under the mutex, before it is done, and is done before this returns.
  try {
    queue_.push_back(OperationPtr(OperationPtr(), &operation));
    if (!is_over()) wait_locked(operation, timeout);
  } catch (const Interruption&) {
    throw;  // the group has ended, and the operation with it
  } catch (const std::exception& cause) {
    abort_operation(operation, cause.what());
    throw;
  }
  guard.unlock();
  if (operation.failed()) throw Error(operation.error());
}

void Group::abort_operation(const Operation& operation, const char* why) {
  // Nothing here allocates, since the process may be out of memory. The other ranks cannot go on without the operation.
  const auto place =
      std::find_if(queue_.begin(), queue_.end(), [&](const auto& queued) { return queued.get() == &operation; });
  if (place != queue_.end()) {
    if (static_cast<size_t>(place - queue_.begin()) < announced_) --announced_;
    queue_.erase(place);
  }
  std::snprintf(world_.mine().abort_text, sizeof world_.mine().abort_text, "operation %llu could not go on: %s",
                static_cast<unsigned long long>(operation.sequence), why);
  Verdict{Verdict::Cause::kAborted, rank(), rank(), operation.sequence}.declare(world_);
  wake_own_sleepers();
}

void Group::abort(const std::string& why) {
  check_process();
  const Lock guard(*this);
  abort_locked(why);
}

void Group::abort_locked(const std::string& why) {
  if (left_.load(std::memory_order_relaxed) || is_over())
    return;  // a verdict must not change what an earlier one refers to
  char* text = world_.mine().abort_text;
  text[why.copy(text, sizeof world_.mine().abort_text - 1)] = '\0';
  Verdict{Verdict::Cause::kAborted, rank(), rank(), started_}.declare(world_);
  progress_locked();
}

bool Group::is_over() {
  if (!Verdict::exists(world_)) return false;
  if (verdict_text_.empty()) {
    const Verdict verdict = Verdict::current(world_);
    verdict_text_ = verdict.text(world_);
    verdict.note(world_, verdict_text_);
  }
  fail_all(verdict_text_);
  return true;
}

void Group::fail_all(const std::string& why) {
  for (const auto& operation : queue_) {
    operation->request.keep_alive.reset();
    operation->fail(why);
  }
  queue_.clear();
  announced_ = 0;
  channels_.fail_all(why);
}

}  // namespace lockstep::shm
