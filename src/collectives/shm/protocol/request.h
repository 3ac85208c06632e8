#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/shm/kernels/element.h"

namespace lockstep::shm {

/// The collectives. Values travel between ranks: append only, 15 at most.
enum class OperationKind : uint8_t {
  kBarrier = 1,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kAllToAllUneven,
};
const char* name(OperationKind kind);

/// The function that the user called, if it is made of several operations. Values travel between ranks: append only, 15
/// at most.
enum class CalledAs : uint8_t {
  kItself,
  kBroadcastBytes,
  kAllGatherBytes,
  kGatherBytes,
  kScatterBytes,
  kBroadcastObject,
  kAllGatherObject,
  kGatherObject,
  kScatterObject,
  kPartWithinMachine,  ///< of an operation over several machines
  kShardedStep,
  kAllocateTogether,
  kSubgroup,
  kSplit,
  kOnThisMachine,
  kOnDevice,  ///< the comparison of an operation on tensors on a device
  // From here on only operations without a root.
  kFreeTogether,
};
const char* name(CalledAs call);

/// Whether the operation reduces elements (sum, min, ...).
constexpr bool is_reduction(OperationKind kind) {
  return kind == OperationKind::kAllReduce || kind == OperationKind::kReduce || kind == OperationKind::kReduceScatter;
}
constexpr bool has_root(OperationKind kind) {
  return kind == OperationKind::kBroadcast || kind == OperationKind::kReduce || kind == OperationKind::kGather ||
         kind == OperationKind::kScatter;
}

/// The parts that only some requests have.
struct Pieces {
  std::vector<const void*> inputs;  ///< the input's blocks, if they are not contiguous
  std::vector<void*> outputs;
  std::vector<size_t> send_counts;     ///< kAllToAllUneven: elements for each rank
  std::vector<size_t> receive_counts;  ///< kAllToAllUneven: elements from each rank
};
inline const Pieces kNoPieces;

/// The collective that a rank asks for: LibTorch-free, on raw memory. kind, type, op, root and count must be the same
/// on every rank (kAllToAllUneven: the counts must match pairwise); they are compared before any data moves.
///
/// A block is `count` elements. `input` and `output` are one block or, where an operation has a block for every rank
/// (outputs of all_gather and gather; inputs of scatter and reduce_scatter; both of all_to_all), world_size contiguous
/// blocks, or the blocks that pieces() lists. Input and output may be the same memory for all_reduce, broadcast and
/// reduce, and a rank's own block may be in place for the others; otherwise they must not overlap.
struct Request {
  OperationKind kind = OperationKind::kBarrier;
  DataType type = DataType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  CalledAs called_as = CalledAs::kItself;  ///< compared too, except for reductions
  bool in_background = false;              ///< the caller may do something else until it waits; see Limits
  int root = 0;
  size_t count = 0;
  double factor = 1;  ///< kPremulSum: this rank's factor
  const void* input = nullptr;
  void* output = nullptr;
  std::shared_ptr<Pieces> some_pieces;  ///< mostly null: writing four vectors takes 10 ns, a small all_reduce 130 ns
  std::shared_ptr<void> keep_alive;     ///< released when the operation is over

  const Pieces& pieces() const { return some_pieces ? *some_pieces : kNoPieces; }
  Pieces& make_pieces() {
    if (!some_pieces) some_pieces = std::make_shared<Pieces>();
    return *some_pieces;
  }
};

/// A call as every message describes it, whichever engine carries it out.
struct Call {
  OperationKind kind = OperationKind::kBarrier;
  DataType type = DataType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  CalledAs called_as = CalledAs::kItself;
  int root = 0;
  size_t count = 0;

  /// "all_reduce(float32, 1024 elements, sum)"; "scatter_object(root 0)", for any of the operations it is made of.
  std::string text() const;
  /// From the bracket on.
  std::string arguments() const;
};
inline Call call_of(const Request& request) {
  return {request.kind, request.type, request.op, is_reduction(request.kind) ? CalledAs::kItself : request.called_as,
          request.root, request.count};
}

/// The part of a request that ranks compare, in 64 bits: it fits beside the sequence word in one cache line.
struct Header {
  uint64_t bits = 0;

  Header() = default;
  explicit Header(uint64_t raw) : bits(raw) {}
  explicit Header(const Request& request)
      : bits(static_cast<uint64_t>(request.kind) | static_cast<uint64_t>(request.type) << 4 |
             (is_reduction(request.kind) ? static_cast<uint64_t>(request.op)
                                         : static_cast<uint64_t>(request.called_as) & 15)
                 << 9 |
             (has_root(request.kind)       ? static_cast<uint64_t>(request.root) << 13
              : is_reduction(request.kind) ? 0
                                           : (static_cast<uint64_t>(request.called_as) >> 4) << 13) |
             static_cast<uint64_t>(request.count) << 20) {}
  OperationKind kind() const { return static_cast<OperationKind>(bits & 15); }
  DataType type() const { return static_cast<DataType>(bits >> 4 & 31); }
  ReduceOp op() const { return static_cast<ReduceOp>(bits >> 9 & 15); }
  CalledAs called_as() const {
    if (is_reduction(kind())) return CalledAs::kItself;
    return static_cast<CalledAs>((bits >> 9 & 15) | (has_root(kind()) ? 0 : (bits >> 13 & 127) << 4));
  }
  int root() const { return has_root(kind()) ? static_cast<int>(bits >> 13 & 127) : 0; }
  size_t count() const { return bits >> 20; }
  Call call() const { return {kind(), type(), op(), called_as(), root(), count()}; }
  std::string text() const { return call().text(); }
  bool operator==(const Header&) const = default;
};
static_assert(static_cast<int>(OperationKind::kAllToAllUneven) < 16 && kMovedDataTypes <= 32 && kReduceOps <= 16);
inline constexpr size_t kMaxCount = (size_t{1} << 44) - 1;

}  // namespace lockstep::shm
