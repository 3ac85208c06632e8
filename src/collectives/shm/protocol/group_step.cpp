#include <algorithm>
#include <bit>
#include <cstring>

#include "collectives/shm/protocol/group.h"
#include "collectives/shm/protocol/rounds.h"

// The stages of one operation, from the queue to its end. Nothing here waits.

namespace lockstep::shm {
namespace {

constexpr size_t kResidentOneWay = size_t{4} << 20;

bool fits_inline(const Operation& operation) {
  return operation.transfer.package_bytes() <= kInlineBytes && operation.request.op != ReduceOp::kPremulSum &&
         operation.request.kind != OperationKind::kAllToAllUneven;
}

bool is_in_place(const Request& request) { return request.input == request.output; }

}  // namespace

bool Group::progress_locked() {
  for (;;) {
    blocked_on_ = blocked_on_any_ = 0;
    while (announced_ < queue_.size() && announce(*queue_[announced_], announced_ == 0)) ++announced_;
    if (announced_ == 0 || !arrive(*queue_.front()) || !move(*queue_.front())) break;
    finish(*queue_.front());
    queue_.pop_front();
    --announced_;
  }
  const size_t messages = channels_.pending();
  channels_.progress(blocked_on_, blocked_on_any_);
  if (channels_.pending() < messages) wake_own_sleepers();
  if (queue_.empty() && channels_.idle()) return false;
  return !is_over();
}

bool Group::everyone_finished(uint64_t sequence) {
  bool all = finished_ >= sequence;
  for (int r = 0; r < size(); ++r) {
    uint64_t& known = finished_by_[static_cast<size_t>(r)];
    if (r == rank() || known >= sequence) continue;
    known = world_.control(r).finished.load(std::memory_order_acquire);  // from finish(): its reads are over
    if (known >= sequence) continue;
    blocked_on_ |= world_.bit(r);
    all = false;
  }
  return all;
}

bool Group::reads_pending_output(const Operation& operation) const {
  const auto* input = static_cast<const std::byte*>(operation.transfer.contiguous_input());
  for (const auto& earlier : queue_) {
    if (earlier.get() == &operation) return false;
    // Pieces are not compared one by one: the operation waits.
    const Request& request = earlier->request;
    if (input == nullptr || !request.pieces().outputs.empty() || request.kind == OperationKind::kAllToAllUneven)
      return true;
    const size_t blocks = is_reduction(request.kind) ? 1 : static_cast<size_t>(size());
    const auto* output = static_cast<const std::byte*>(request.output);
    if (output != nullptr && input < output + blocks * earlier->transfer.block_bytes() &&
        output < input + operation.transfer.package_bytes())
      return true;
  }
  return false;
}

bool Group::announce(Operation& operation, bool head) {
  const uint64_t sequence = operation.sequence;
  if (sequence > kRingLines && !everyone_finished(sequence - kRingLines)) return false;
  if (!head && operation.transfer.gives(rank()) && reads_pending_output(operation)) return false;
  Line& line = world_.line(rank(), sequence);
  if (!fits_inline(operation)) {
    if (!place_package(operation, line)) return false;
  } else if (operation.transfer.gives(rank())) {
    operation.transfer.pack(line.data, operation.transfer.block_bytes(), 0, operation.transfer.block_bytes());
  }
  line.header = operation.header.bits;
  // Releases line and package to arrive(); seq_cst for notify(), as every word that a rank may sleep for.
  line.word.store(Announcement::pack(sequence, sequence - finished_), std::memory_order_seq_cst);
  operation.stage = Operation::Stage::kAnnounced;
  world_.notify();
  return true;
}

bool Group::place_package(Operation& operation, Line& line) {
  const Transfer& transfer = operation.transfer;
  const Request& request = operation.request;
  const bool all_reduce = request.kind == OperationKind::kAllReduce;
  const bool uneven = request.kind == OperationKind::kAllToAllUneven;
  size_t bytes = uneven ? 2 * sizeof(uint64_t) * static_cast<size_t>(size())
                        : (transfer.gives(rank()) ? transfer.package_bytes() : 0);
  const void* input = transfer.contiguous_input();
  // One rank's data that does not fit into the caches moves faster through the chunks, with a core at either end.
  const bool one_way = has_root(request.kind) && bytes > kResidentOneWay;
  const bool resident = transfer.gives(rank()) && input != nullptr && (!all_reduce || is_in_place(request)) &&
                        !one_way && arena_->contains(input, bytes);
  const size_t limit = all_reduce ? (resident ? limits_.one_shot : limits_.private_one_shot) : limits_.eager;
  const bool stage = uneven || (transfer.package_bytes() <= limit && bytes > 0);
  std::optional<size_t> at;
  if (stage) {
    at = allocate_eager(operation.sequence, bytes);
    if (!at) return false;
    std::byte* to = world_.eager(rank()) + *at;
    if (uneven) {
      line.where.longest = transfer.longest_bytes();
      std::copy(request.pieces().send_counts.begin(), request.pieces().send_counts.end(),
                reinterpret_cast<uint64_t*>(to));
      std::copy(request.pieces().receive_counts.begin(), request.pieces().receive_counts.end(),
                reinterpret_cast<uint64_t*>(to) + size());
    } else {
      transfer.pack(to, transfer.block_bytes(), 0, transfer.block_bytes());
    }
  }
  line.where.eager = at ? *at : kNowhere;
  line.where.resident = resident && !stage ? arena_->offset(input) : kNowhere;
  line.where.factor = request.factor;
  return true;
}

std::optional<size_t> Group::allocate_eager(uint64_t sequence, size_t bytes) {
  const auto release = [&]() LOCKSTEP_REQUIRES(mutex_) {
    eager_.release(*std::min_element(finished_by_.begin(), finished_by_.begin() + size()));
  };
  release();
  auto at = eager_.allocate(sequence, bytes);
  if (!at && everyone_finished(finished_)) {  // what was known may be stale
    release();
    at = eager_.allocate(sequence, bytes);
  }
  return at;
}

bool Group::arrive(Operation& operation) {
  if (operation.stage == Operation::Stage::kMoving) return true;
  for (uint64_t missing = world_.others() & ~operation.arrived; missing != 0; missing &= missing - 1) {
    const int r = std::countr_zero(missing);
    const Line& line = world_.line(r, operation.sequence);
    const uint64_t word = line.word.load(std::memory_order_acquire);  // from announce()
    if (Announcement::sequence(word) != operation.sequence) {
      blocked_on_ |= world_.bit(r);
      continue;
    }
    if (line.header != operation.header.bits) {
      Verdict{Verdict::Cause::kMismatch, rank(), r, operation.sequence}.declare(world_);
      return false;
    }
    uint64_t& known = finished_by_[static_cast<size_t>(r)];
    known = std::max(known, Announcement::finished(word));
    operation.arrived |= world_.bit(r);
  }
  if (operation.arrived != world_.others()) return false;
  choose_method(operation);
  if (operation.request.kind == OperationKind::kAllToAllUneven && !splits_agree(operation)) return false;
  operation.stage = Operation::Stage::kMoving;
  operation.transfer.keep_own();
  return true;
}

void Group::choose_method(Operation& operation) {
  operation.method = Method::kInline;
  if (fits_inline(operation)) return;
  if (operation.request.op == ReduceOp::kPremulSum) operation.factors.resize(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    const Line& line = world_.line(r, operation.sequence);
    if (line.where.eager != kNowhere) operation.staged |= world_.bit(r);
    if (line.where.resident != kNowhere) operation.resident |= world_.bit(r);
    if (!operation.factors.empty()) operation.factors[static_cast<size_t>(r)] = line.where.factor;
  }
  const uint64_t everyone = world_.others() | world_.bit(rank());
  const bool all_reduce = operation.request.kind == OperationKind::kAllReduce;
  operation.method = Method::kRounds;
  if (operation.request.kind == OperationKind::kAllToAllUneven) return;
  const bool at_once = all_reduce ? operation.staged == everyone : operation.transfer.package_bytes() <= limits_.eager;
  if (at_once || size() == 1)
    operation.method = Method::kEager;
  else if (all_reduce && operation.resident == everyone)
    operation.method = Method::kInPlace;
}

bool Group::splits_agree(const Operation& operation) {
  const auto n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  for (size_t r = 0; r < n; ++r) {
    const Line& line = world_.line(static_cast<int>(r), operation.sequence);
    const auto* theirs = reinterpret_cast<const uint64_t*>(world_.eager(static_cast<int>(r)) + line.where.eager);
    if (theirs[me] == operation.request.pieces().receive_counts[r] &&
        theirs[n + me] == operation.request.pieces().send_counts[r])
      continue;
    Verdict{Verdict::Cause::kSplits, rank(), static_cast<int>(r), operation.sequence}.declare(world_);
    return false;
  }
  return true;
}

bool Group::move(Operation& operation) {
  switch (operation.method) {
    case Method::kInline:
    case Method::kEager:
      return move_at_once(operation);
    case Method::kInPlace:
      return move_in_place(operation);
    case Method::kRounds:
      return move_in_rounds(operation);
  }
  return true;
}

bool Group::move_at_once(Operation& operation) {
  const Transfer& transfer = operation.transfer;
  if (!transfer.takes(rank())) return true;
  const size_t mine = transfer.has_block_per_rank() ? static_cast<size_t>(rank()) * transfer.block_bytes() : 0;
  const std::byte* from[kMaxRanks];
  for (int r = 0; r < size(); ++r) {
    const Line& line = world_.line(r, operation.sequence);
    from[r] = nullptr;
    if (transfer.takes_from(rank(), r))
      from[r] = (operation.method == Method::kInline ? line.data : world_.eager(r) + line.where.eager) + mine;
  }
  transfer.unpack(from, 0, transfer.block_bytes(), operation.reduce, operation.factors.data());
  return true;
}

bool Group::move_in_rounds(Operation& operation) {
  if (!operation.rounds) {
    operation.rounds = std::make_unique<Rounds>(world_, operation, rounds_before_);
    operation.round_count = operation.rounds->count();
  }
  const uint64_t before = operation.rounds->moved();
  const bool over = operation.rounds->step(blocked_on_);
  rounds_moved_ += operation.rounds->moved() - before;
  return over;
}

bool Group::move_in_place(Operation& operation) {
  const uint64_t done = rounds_before_ + 1;
  if (!operation.slice_reduced) {
    operation.round_count = 1;
    const size_t bytes = operation.transfer.block_bytes(), n = static_cast<size_t>(size());
    const size_t part = Geometry::round_up((bytes + n - 1) / n, bytes >= (size_t{1} << 20) ? 4096 : kCacheLine);
    const size_t begin = std::min(bytes, static_cast<size_t>(rank()) * part), end = std::min(bytes, begin + part);
    void* buffers[kMaxRanks];
    for (int r = 0; r < size(); ++r) {
      const size_t at = world_.line(r, operation.sequence).where.resident;
      buffers[r] = world_.resident(r) + at + begin;
      if (r == rank()) continue;
      const size_t in_segment = world_.geometry().resident_at() + at;
      populated_[static_cast<size_t>(r)].populate(world_.segment(r), in_segment + begin, in_segment + end);
    }
    const size_t element = element_bytes(operation.request.type);
    reduce_in_parts(operation.reduce,
                    {buffers, size(), buffers, size(), (end - begin) / element, operation.factors.data()}, element,
                    share_out_);
    operation.slice_reduced = true;
    // Releases the slice, in everyone's buffer, to the loads below.
    world_.mine().reduced.store(done, std::memory_order_seq_cst);
    world_.notify();
  }
  bool all = true;
  for (int r = 0; r < size(); ++r) {
    // From the store above: all slices of this rank's buffer are sums, and nobody reads its input any longer.
    if (r == rank() || reached(world_.control(r).reduced.load(std::memory_order_acquire), done)) continue;
    blocked_on_ |= world_.bit(r);
    all = false;
  }
  return all;
}

void Group::finish(Operation& operation) {
  finished_ = operation.sequence;
  finished_by_[static_cast<size_t>(rank())] = finished_;
  rounds_before_ += operation.round_count;
  operation.request.keep_alive.reset();
  operation.rounds.reset();
  operation.succeed();
  // Releases this rank's reads to everyone_finished() and may_fill(), which let others write there again.
  world_.mine().finished.store(finished_, std::memory_order_seq_cst);
  world_.notify();
  wake_own_sleepers();
  // The others' caches hold the line that will announce the next operation: fetching it now saves the time then.
  __builtin_prefetch(&world_.line(rank(), finished_ + 1), 1);
}

}  // namespace lockstep::shm
