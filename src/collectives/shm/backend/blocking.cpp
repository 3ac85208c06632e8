#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "base/error.h"
#include "collectives/called_as.h"
#include "collectives/shm/backend/backend_class.h"
#include "collectives/shm/backend/page_notes.h"
#include "collectives/shm/reduce.h"

// Operations without a Work: those of Group, and those of which Python wants the result alone. There is nothing to
// allocate for them, nothing to wrap for Python, and no second call that waits.

namespace lockstep::shm_engine {
namespace {

shm::OperationKind kind_of(BlockingEngine::Kind kind) {
  switch (kind) {
    case BlockingEngine::Kind::kAllReduce:
      return shm::OperationKind::kAllReduce;
    case BlockingEngine::Kind::kBroadcast:
      return shm::OperationKind::kBroadcast;
    case BlockingEngine::Kind::kAllGather:
      return shm::OperationKind::kAllGather;
    case BlockingEngine::Kind::kReduceScatter:
      return shm::OperationKind::kReduceScatter;
    case BlockingEngine::Kind::kBarrier:
      return shm::OperationKind::kBarrier;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown kind of operation");
}

shm::ReduceOp op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return shm::ReduceOp::kSum;
    case ReduceOp::kMean:
      return shm::ReduceOp::kAverage;
    case ReduceOp::kProduct:
      return shm::ReduceOp::kProduct;
    case ReduceOp::kMin:
      return shm::ReduceOp::kMin;
    case ReduceOp::kMax:
      return shm::ReduceOp::kMax;
    case ReduceOp::kAnd:
      return shm::ReduceOp::kBitAnd;
    case ReduceOp::kOr:
      return shm::ReduceOp::kBitOr;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown reduce op");
}

}  // namespace

void ShmBackend::run(const Call& call) {
  const auto type = data_type(call.dtype);
  TORCH_CHECK_TYPE(type, call.dtype, " tensors cannot be reduced; convert them first");
  ++sequence_;
  shared_->group().run({.kind = kind_of(call.kind),
                        .type = *type,
                        .op = op_of(call.op),
                        .called_as = called_as,
                        .root = call.root,
                        .count = static_cast<size_t>(call.count),
                        .input = call.input,
                        .output = call.output},
                       timeout_.load());
}

bool ShmBackend::is_immediate(const Task& task) {
  // The profiler wants a Work; a refused operation must not be told of on the page.
  if (!task.waits || task.requests.size() != 1 || at::hasCallbacks()) return false;
  const shm::Request& request = task.requests.front();
  if (request.root < 0 || request.root >= getSize()) return false;
  if (shm::is_reduction(request.kind) && shm::find_reduce(request.type, request.op, getSize()) == nullptr) return false;
  const std::lock_guard lock(mutex_);
  return !coalescing_;
}

void ShmBackend::finish_now(Task task) {
  const uint64_t sequence = ++sequence_;
  const bool told = shared_->keeps_page();
  if (told) note_start(&task, task.title, task.inputs, sequence);
  try {
    shared_->group().run(std::move(task.requests.front()), bounded(task.timeout));
  } catch (const Error& error) {
    if (told) note_end(&task, sequence, /*failed=*/true);
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  at::NoGradGuard no_grad;
  for (const auto& step : task.finish) step();
  if (told) note_end(&task, sequence, /*failed=*/false);
}

}  // namespace lockstep::shm_engine
