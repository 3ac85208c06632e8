#include "collectives/shm/protocol/request.h"

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

const char* name(CalledAs call) {
  switch (call) {
    case CalledAs::kItself:
      break;
    case CalledAs::kBroadcastBytes:
      return "broadcast_bytes";
    case CalledAs::kAllGatherBytes:
      return "all_gather_bytes";
    case CalledAs::kGatherBytes:
      return "gather_bytes";
    case CalledAs::kScatterBytes:
      return "scatter_bytes";
    case CalledAs::kBroadcastObject:
      return "broadcast_object";
    case CalledAs::kAllGatherObject:
      return "all_gather_object";
    case CalledAs::kGatherObject:
      return "gather_object";
    case CalledAs::kScatterObject:
      return "scatter_object";
    case CalledAs::kPartWithinMachine:
      return "the part of an operation within this machine";
    case CalledAs::kShardedStep:
      return "sharded_step";
    case CalledAs::kAllocateTogether:
      return "allocate_together";
    case CalledAs::kSubgroup:
      return "subgroup";
    case CalledAs::kSplit:
      return "split";
    case CalledAs::kOnThisMachine:
      return "on_this_machine";
    case CalledAs::kOnDevice:
      return "an operation on tensors on a device";
    case CalledAs::kFreeTogether:
      return "free";
  }
  return "unknown operation";
}

std::string Call::text() const {
  if (called_as == CalledAs::kPartWithinMachine || called_as == CalledAs::kOnDevice) return name(called_as);
  return (called_as == CalledAs::kItself ? name(kind) : name(called_as)) + arguments();
}

std::string Call::arguments() const {
  const std::string its_root = has_root(kind) ? "root " + std::to_string(root) : "";
  if (called_as != CalledAs::kItself) return "(" + its_root + ")";
  if (kind == OperationKind::kBarrier) return "()";
  std::string text = std::string("(") + name(type);
  text += kind == OperationKind::kAllToAllUneven ? ", given splits" : ", " + std::to_string(count) + " elements";
  if (is_reduction(kind)) text += std::string(", ") + name(op);
  if (has_root(kind)) text += ", " + its_root;
  return text + ")";
}

}  // namespace lockstep::shm
