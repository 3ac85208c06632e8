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

std::string Header::text() const {
  if (kind() == OperationKind::kBarrier) return "barrier()";
  std::string text = std::string(name(kind())) + "(" + name(type());
  text += kind() == OperationKind::kAllToAllUneven ? ", given splits" : ", " + std::to_string(count()) + " elements";
  if (is_reduction(kind())) text += std::string(", ") + name(op());
  if (has_root(kind())) text += ", root " + std::to_string(root());
  return text + ")";
}

}  // namespace lockstep::shm
