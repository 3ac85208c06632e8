#include "collectives/shm/backend/backend_class.h"

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
                        .root = call.root,
                        .count = static_cast<size_t>(call.count),
                        .input = call.input,
                        .output = call.output},
                       timeout_.load());
}

}  // namespace lockstep::shm_engine
