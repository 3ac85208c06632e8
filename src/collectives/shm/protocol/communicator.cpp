#include "collectives/shm/protocol/communicator.h"

#include <algorithm>

#include "base/error.h"
#include "base/interruption.h"
#include "collectives/shm/protocol/verdict.h"

namespace lockstep::shm {
namespace {

/// Completes and checks a request; throws Error if it is invalid. Returns the kernel that reduces its elements, or null
/// if it is not a reduction.
ReduceFunction prepare(Request& request, int size) {
  const auto refuse = [&](const std::string& why) { throw Error(Header(request).text() + ": " + why); };
  if (request.count > kMaxCount) refuse("too many elements");
  if (request.root < 0 || request.root >= size)  // a header has no room for it
    throw Error(std::string(name(request.kind)) + ": a group of " + std::to_string(size) +
                " ranks has no such root: " + std::to_string(request.root));
  const ReduceFunction reduce = is_reduction(request.kind) ? find_reduce(request.type, request.op, size) : nullptr;
  if (is_reduction(request.kind) && reduce == nullptr)
    refuse(std::string(name(request.op)) + " is not defined for " + name(request.type));
  const auto n = static_cast<size_t>(size);
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

}  // namespace

Communicator::Communicator(World world, std::shared_ptr<ProgressSet> set, std::optional<Limits> limits)
    : world_(std::move(world)),
      set_(std::move(set)),
      arena_(std::make_shared<Arena>(world_.segment(world_.rank()), world_.geometry().resident_at())),
      engine_(world_, *arena_, limits.value_or(Limits::of(world_.size(), !world_.spin())), admission_),
      waiter_(world_, engine_, *set_, *this) {
  set_->add(this);
}

Communicator::~Communicator() {
  // A child of fork() does not have the memory, and a mutex that was held at the fork will never be unlocked there.
  if (!admission_.is_own_process()) return;
  set_->remove(this);
  leave();
}

std::string Communicator::finish(const Deadline& deadline) {
  if (!admission_.is_own_process() || admission_.has_left()) return "";
  constexpr std::chrono::milliseconds kSleep{5};
  const class Never final : public Work {
  } never;
  const CountedLock guard(mutex_);
  const Pipeline& pipeline = engine_.pipeline();
  engine_.advance();
  const auto is_done = [&] { return pipeline.is_empty() && engine_.channels().sends_to() == 0; };
  while (!is_done() && !engine_.is_over() && !deadline.passed()) waiter_.poll(mutex_, never, kSleep);
  if (!engine_.failure().empty() || pipeline.is_empty()) return engine_.failure();
  return announced(world_, rank(), pipeline.at_hand()) + ", is not done: not all ranks have called it";
}

void Communicator::leave() {
  admission_.check_process();
  const CountedLock guard(mutex_);
  if (admission_.leave()) engine_.leave();
}

WorkPtr Communicator::start(Request request) {
  admission_.check_member();
  request.in_background = true;
  const ReduceFunction reduce = prepare(request, size());
  const CountedLock guard(mutex_);
  waiter_.note_caller();
  engine_.pipeline().announcer().commit_for(request);
  auto operation =
      std::make_shared<Operation>(std::move(request), reduce, rank(), size(), engine_.pipeline().next_sequence());
  engine_.pipeline().push(operation);
  if (!engine_.is_over()) engine_.advance();
  return operation;
}

void Communicator::check_peer(const char* call, int peer) const {
  if (peer < 0 || peer >= size() || peer == rank())
    throw Error(std::string(call) + ": rank " + std::to_string(peer) + " is not another rank of the group");
}

WorkPtr Communicator::send(const void* data, size_t bytes, int to, int64_t tag, std::shared_ptr<void> keep_alive,
                           DataType type) {
  admission_.check_member();
  check_peer("send", to);
  const CountedLock guard(mutex_);
  waiter_.note_caller();
  auto message = engine_.channels().send(data, bytes, to, tag, std::move(keep_alive), type);
  if (!engine_.is_over()) engine_.advance();
  return message;
}

MessagePtr Communicator::receive(void* data, size_t bytes, int from, int64_t tag, std::shared_ptr<void> keep_alive,
                                 DataType type) {
  admission_.check_member();
  if (from != kAnySource) check_peer("receive", from);
  const CountedLock guard(mutex_);
  waiter_.note_caller();
  auto message = engine_.channels().receive(data, bytes, from, tag, std::move(keep_alive), type);
  if (!engine_.is_over()) engine_.advance();
  return message;
}

WorkPtr Communicator::send_at_once(const void* data, size_t bytes, int to, int64_t tag, DataType type) {
  admission_.check_member();
  check_peer("send", to);
  const CountedLock guard(mutex_);
  waiter_.note_caller();
  if (!Verdict::exists(world_)) return engine_.channels().send_at_once(data, bytes, to, tag, type);
  auto message = engine_.channels().send(data, bytes, to, tag, nullptr, type);
  if (!engine_.is_over()) engine_.advance();
  return message;
}

int Communicator::receive_now(void* data, size_t bytes, int from, int64_t tag, DataType type,
                              std::chrono::milliseconds timeout) {
  admission_.check_member();
  if (from != kAnySource) check_peer("receive", from);
  const CountedLock guard(mutex_);
  waiter_.note_caller();
  WaitPolicy policy(world_.spin(), timeout);
  Channels& channels = engine_.channels();
  MessagePtr message;
  if (from != kAnySource && engine_.is_idle() && channels.may_receive_at_once(from)) {
    waiter_.spin(mutex_, from, policy, [&] { return channels.has_come(from) || Verdict::exists(world_); });
    if (!Verdict::exists(world_)) {
      message = channels.receive_at_once(data, bytes, from, tag, type);
      if (message == nullptr) return from;
    }
  }
  if (message == nullptr) message = channels.receive(data, bytes, from, tag, nullptr, type);
  if (!engine_.is_over()) waiter_.wait(mutex_, *message, policy);
  if (message->failed()) throw Error(message->error());
  return message->source();
}

bool Communicator::progress() {
  admission_.check_process();
  // As a thread that waits does: ranks may poll operations of several groups in different orders.
  set_->progress_others(this);
  const CountedLock guard(mutex_);
  return engine_.advance();
}

void Communicator::wait(Work& work, std::chrono::milliseconds timeout, Clock::time_point since) {
  if (!work.done()) {
    admission_.check_process();
    WaitPolicy policy(world_.spin(), timeout, since);
    const CountedLock guard(mutex_);
    waiter_.wait(mutex_, work, policy);
  }
  if (work.failed()) throw Error(work.error());
}

void Communicator::poll(const Work& work, std::chrono::microseconds at_most) {
  admission_.check_process();
  const CountedLock guard(mutex_);
  waiter_.poll(mutex_, work, at_most);
}

bool Communicator::try_progress() {
  if (!mutex_.try_lock()) return false;
  const CountedLock guard(mutex_, std::adopt_lock);
  return engine_.advance();
}

bool Communicator::with_waiter(const std::function<void(Waiter&)>& body, bool at_once) {
  if (!at_once)
    mutex_.lock();
  else if (!mutex_.try_lock())
    return false;
  const CountedLock guard(mutex_, std::adopt_lock);
  body(waiter_);
  return true;
}

void Communicator::share_out_by(ShareOut share_out) {
  const CountedLock guard(mutex_);
  engine_.pipeline().mover().share_out_by(std::move(share_out));
}

uint64_t Communicator::waiting_for() {
  const CountedLock guard(mutex_);
  return engine_.waits_for();
}

void Communicator::run(Request&& request, std::chrono::milliseconds timeout, const std::function<void()>& announced) {
  admission_.check_member();
  const ReduceFunction reduce = prepare(request, size());
  CountedLock guard(mutex_);
  engine_.pipeline().announcer().commit_for(request);
  Operation operation(std::move(request), reduce, rank(), size(), engine_.pipeline().next_sequence());
  // It lives on the stack: it leaves the queue, under the mutex, before it is done, and is done before this returns.
  try {
    engine_.pipeline().push(OperationPtr(OperationPtr(), &operation));
    if (!engine_.is_over()) {
      if (announced) {
        engine_.advance();
        announced();
      }
      if (!operation.done()) waiter_.wait(mutex_, operation, timeout);
    }
  } catch (const Interruption&) {
    throw;  // the group has ended, and the operation with it
  } catch (const std::exception& cause) {
    engine_.abort_operation(operation, cause.what());
    throw;
  }
  guard.unlock();
  if (operation.failed()) throw Error(operation.error());
}

void Communicator::abort(const std::string& why) {
  admission_.check_process();
  const CountedLock guard(mutex_);
  engine_.abort(why);
}

}  // namespace lockstep::shm
