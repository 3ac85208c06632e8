#pragma once

#include <memory>
#include <vector>

#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/protocol/request.h"
#include "collectives/shm/protocol/transfer.h"
#include "collectives/shm/protocol/work.h"
#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

class Rounds;

/// How an operation's data moves. Every rank derives the same method from what all ranks announced.
enum class Method : uint8_t {
  kInline,   ///< in the announcing line
  kEager,    ///< from every rank's eager area, at once
  kInPlace,  ///< all_reduce: each rank sums its slice of all buffers, resident or staged, in place
  kRounds,   ///< in bounded rounds through the chunks, or straight from resident inputs
};

/// Sizes up to which a method is used; the same on every rank.
struct Limits {
  size_t one_shot;          ///< all_reduce: every rank sums everything, whatever the memory
  size_t private_one_shot;  ///< the same for all_reduce of private buffers
  size_t staged;            ///< these are copied when announced, and summed in slices where they were copied to
  size_t one_way;           ///< operations with a root: packages are copied when announced
  size_t warm, cold;  ///< the same beyond `warm` and up to `cold`, of private buffers: to memory that nobody caches
  size_t both_ways;   ///< all others: the same
  size_t background;  ///< both, where a rank may do something else meanwhile

  size_t eager(OperationKind kind) const { return has_root(kind) ? one_way : both_ways; }
  /// `crowded`: there are more ranks than processors for them.
  static Limits of(int world_size, bool crowded = false);
};

/// One collective of one rank, from start to end. Callers see a Work; the rest is guarded by the communicator's mutex.
class Operation : public Work {
 public:
  /// `kernel` is null unless the operation is a reduction.
  Operation(Request&& what, ReduceFunction kernel, int rank, int size, uint64_t number);
  ~Operation() override;

  enum class Stage : uint8_t {
    kQueued,     ///< not announced yet: there is no room, or an earlier operation writes what this one reads
    kAnnounced,  ///< others may read it; it waits for all others' announcements
    kKept,       ///< the same, and its own block is where it belongs
    kMoving,     ///< headers match; data moves
  };

  /// Whether its data travels with its announcement.
  bool fits_inline() const {
    return transfer.package_bytes() <= kInlineBytes && request.op != ReduceOp::kPremulSum &&
           request.kind != OperationKind::kAllToAllUneven;
  }

  Request request;
  const Header header;
  const Transfer transfer;
  const uint64_t sequence;
  const ReduceFunction reduce;
  Stage stage = Stage::kQueued;
  Method method = Method::kInline;
  uint64_t arrived = 0;         ///< ranks whose announcement was seen and agrees, as bits
  uint64_t resident = 0;        ///< ranks whose package lies in resident memory, as bits
  uint64_t staged = 0;          ///< ranks whose package lies in their eager area, as bits
  uint64_t summed = 0;          ///< kInPlace: ranks whose slice has reached this rank's output, as bits
  uint64_t round_count = 0;     ///< the number of its rounds, the same on every rank; known once it moves
  std::vector<double> factors;  ///< kPremulSum: every rank's factor
  std::unique_ptr<Rounds> rounds;
};
using OperationPtr = std::shared_ptr<Operation>;

}  // namespace lockstep::shm
