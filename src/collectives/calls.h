#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "collectives/called_as.h"
#include "collectives/core_types.h"
#include "collectives/shm/protocol/request.h"

// The calls that Group's operations make to an engine, and their form in messages.

namespace lockstep {

/// A request that only moves the tensor's elements.
inline shm::Request moving(shm::OperationKind kind, const at::Tensor& tensor, int root = 0) {
  const shm::DataType type = to_moved(tensor.scalar_type());
  return {.kind = kind, .type = type, .root = root, .count = tensor.nbytes() / shm::element_bytes(type)};
}

inline shm::Request reducing(shm::OperationKind kind, const at::Tensor& tensor, ReduceOp op, int root = 0) {
  shm::Request request = moving(kind, tensor, root);
  request.op = to_core(op);
  return request;
}

/// The call as this thread's user made it.
inline shm::Call call_now(const shm::Request& request) {
  shm::Call call = shm::call_of(request);
  if (!shm::is_reduction(call.kind)) call.called_as = called_as;
  return call;
}

/// "to rank 1, tag 7".
inline std::string message_name(const char* direction, int peer, int tag) {
  return std::string(direction) + " rank " + std::to_string(peer) + ", tag " + std::to_string(tag);
}

}  // namespace lockstep
