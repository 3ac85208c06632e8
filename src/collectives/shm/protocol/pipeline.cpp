#include "collectives/shm/protocol/pipeline.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "base/error.h"
#include "collectives/shm/kernels/write_lines.h"
#include "collectives/shm/protocol/rounds.h"
#include "collectives/shm/protocol/verdict.h"
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
//   - No thread waits for a word while it holds something that another rank needs: only Waiter::sleep() blocks.

namespace lockstep::shm {

uint64_t Pipeline::next_sequence() {
  if (started_ == kLastOperation)
    throw Error("rank " + std::to_string(world_.rank()) + ": this group has carried out " +
                std::to_string(kLastOperation) + " operations, the most that it can count; make a new group");
  const uint64_t sequence = ++started_;
  if (const std::string_view label = OperationLabel::current(); !label.empty())
    label_of(world_, world_.rank(), sequence).store(sequence, label);
  return sequence;
}

void Pipeline::remove(const Operation& operation) {
  const auto place =
      std::find_if(queue_.begin(), queue_.end(), [&](const auto& queued) { return queued.get() == &operation; });
  if (place == queue_.end()) return;
  if (static_cast<size_t>(place - queue_.begin()) < announced_) --announced_;
  queue_.erase(place);
}

bool Pipeline::has_background() const {
  return std::any_of(queue_.begin(), queue_.end(), [](const auto& queued) { return queued->request.in_background; });
}

void Pipeline::fail_all(const std::string& why) {
  for (const auto& operation : queue_) {
    operation->request.keep_alive.reset();
    operation->fail(why);
  }
  queue_.clear();
  announced_ = 0;
}

bool Pipeline::reads_pending_output(const Operation& operation) const {
  const auto* input = static_cast<const std::byte*>(operation.transfer.contiguous_input());
  for (const auto& earlier : queue_) {
    if (earlier.get() == &operation) return false;
    // Pieces are not compared one by one: the operation waits.
    const Request& request = earlier->request;
    if (input == nullptr || !request.pieces().outputs.empty() || request.kind == OperationKind::kAllToAllUneven)
      return true;
    const size_t blocks = is_reduction(request.kind) ? 1 : static_cast<size_t>(world_.size());
    const auto* output = static_cast<const std::byte*>(request.output);
    if (output != nullptr && input < output + blocks * earlier->transfer.block_bytes() &&
        output < input + operation.transfer.package_bytes())
      return true;
  }
  return false;
}

bool Pipeline::arrive(Operation& operation, uint64_t& blocked_on) {
  if (operation.stage == Operation::Stage::kMoving) return true;
  for (uint64_t missing = world_.others() & ~operation.arrived; missing != 0; missing &= missing - 1) {
    const int r = std::countr_zero(missing);
    const Line& line = world_.line(r, operation.sequence);
    const uint64_t word = line.word.load(std::memory_order_acquire);  // from Announcer::announce()
    if (Announcement::sequence(word) != operation.sequence) {
      blocked_on |= world_.bit(r);
      continue;
    }
    if (line.header != operation.header.bits) {
      Verdict{Verdict::Cause::kMismatch, world_.rank(), r, operation.sequence}.declare(world_);
      return false;
    }
    finished_.note(r, Announcement::finished(word));
    operation.arrived |= world_.bit(r);
  }
  if (operation.arrived != world_.others()) return false;
  choose_method(operation);
  if (operation.request.kind == OperationKind::kAllToAllUneven && !splits_agree(operation, blocked_on)) return false;
  if (operation.stage != Operation::Stage::kKept) operation.transfer.keep_own();
  operation.stage = Operation::Stage::kMoving;
  return true;
}

void Pipeline::choose_method(Operation& operation) {
  operation.method = Method::kInline;
  if (operation.fits_inline()) return;
  if (operation.request.op == ReduceOp::kPremulSum) operation.factors.resize(static_cast<size_t>(world_.size()));
  for (int r = 0; r < world_.size(); ++r) {
    const Line& line = world_.line(r, operation.sequence);
    if (line.where.eager != kNowhere) operation.staged |= world_.bit(r);
    if (line.where.resident != kNowhere) operation.resident |= world_.bit(r);
    if (!operation.factors.empty()) operation.factors[static_cast<size_t>(r)] = line.where.factor;
  }
  const uint64_t everyone = world_.others() | world_.bit(world_.rank());
  const bool all_reduce = operation.request.kind == OperationKind::kAllReduce;
  operation.method = Method::kRounds;
  if (operation.request.kind == OperationKind::kAllToAllUneven) {
    operation.staged = 0;  // those are the counts
    return;
  }
  uint64_t givers = 0;
  for (int r = 0; r < world_.size(); ++r)
    if (operation.transfer.gives(r)) givers |= world_.bit(r);
  const size_t bytes = operation.transfer.package_bytes();
  const bool staged = (givers & ~operation.staged) == 0;
  const bool at_once = bytes == 0 || (staged && (!all_reduce || bytes <= limits_.private_one_shot));
  if (at_once || world_.size() == 1)
    operation.method = Method::kEager;
  else if (all_reduce && (operation.resident | operation.staged) == everyone)
    operation.method = Method::kInPlace;
}

bool Pipeline::splits_agree(const Operation& operation, uint64_t& blocked_on) {
  const auto n = static_cast<size_t>(world_.size()), me = static_cast<size_t>(world_.rank());
  const auto counts_of = [&](size_t r) {
    const Line& line = world_.line(static_cast<int>(r), operation.sequence);
    return reinterpret_cast<const uint64_t*>(world_.eager(static_cast<int>(r)) + line.where.eager);
  };
  // All pairs, so that no rank moves anything where two others do not match. One of the two declares it.
  for (size_t from = 0; from < n; ++from)
    for (size_t to = 0; to < n; ++to) {
      if (counts_of(from)[to] == counts_of(to)[n + from]) continue;
      if (from == me || to == me) {
        const auto other = static_cast<int>(from == me ? to : from);
        Verdict{Verdict::Cause::kSplits, world_.rank(), other, operation.sequence}.declare(world_);
      } else {
        blocked_on |= world_.bit(static_cast<int>(from)) | world_.bit(static_cast<int>(to));
      }
      return false;
    }
  return true;
}

void Pipeline::finish(Operation& operation) {
  finished_.set_own(operation.sequence);
  mover_.finish(operation);
  operation.request.keep_alive.reset();
  operation.rounds.reset();
  operation.succeed();
  // Releases this rank's reads to FinishedCounts::everyone() and Rounds::may_fill(), which let others write there
  // again.
  world_.mine().finished.store(operation.sequence, std::memory_order_seq_cst);
  world_.notify();
  // The others' caches hold the line that will announce the next operation: fetching it now saves the time then. The
  // next operation is mostly as long as one of the last two.
  const size_t bytes = operation.fits_inline() ? operation.transfer.package_bytes() : 0;
  const size_t fetched = offsetof(Line, data) + std::max(bytes, last_inline_bytes_);
  last_inline_bytes_ = bytes;
  fetch_to_write(&world_.line(world_.rank(), operation.sequence + 1), fetched);
}

}  // namespace lockstep::shm
