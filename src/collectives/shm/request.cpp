#include "collectives/shm/request.h"

namespace lockstep::shm {

const char* name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kBarrier:
      return "barrier";
    case OperationKind::kAllReduce:
      return "all_reduce";
    case OperationKind::kBroadcast:
      return "broadcast";
    case OperationKind::kReduce:
      return "reduce";
    case OperationKind::kAllGather:
      return "all_gather";
    case OperationKind::kGather:
      return "gather";
    case OperationKind::kScatter:
      return "scatter";
    case OperationKind::kReduceScatter:
      return "reduce_scatter";
    case OperationKind::kAllToAll:
    case OperationKind::kAllToAllUneven:
      return "all_to_all";
  }
  return "unknown operation";
}

namespace {

bool reduces(OperationKind kind) {
  return kind == OperationKind::kAllReduce || kind == OperationKind::kReduce || kind == OperationKind::kReduceScatter;
}

bool has_root(OperationKind kind) {
  return kind == OperationKind::kBroadcast || kind == OperationKind::kReduce || kind == OperationKind::kGather ||
         kind == OperationKind::kScatter;
}

}  // namespace

Header::Header(const Request& request) {
  bits = static_cast<uint64_t>(request.kind) | static_cast<uint64_t>(request.type) << 5 |
         (reduces(request.kind) ? static_cast<uint64_t>(request.op) << 9 : 0) |
         (has_root(request.kind) ? static_cast<uint64_t>(request.root) << 13 : 0) |
         static_cast<uint64_t>(request.count) << 20;
}

std::string Header::text() const {
  if (kind() == OperationKind::kBarrier) return "barrier()";
  std::string text = std::string(name(kind())) + "(" + name(type());
  text += kind() == OperationKind::kAllToAllUneven ? ", given splits" : ", " + std::to_string(count()) + " elements";
  if (reduces(kind())) text += std::string(", ") + name(op());
  if (has_root(kind())) text += ", root " + std::to_string(root());
  return text + ")";
}

}  // namespace lockstep::shm
