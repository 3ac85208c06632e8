#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/hierarchical/carrier.h"
#include "collectives/hierarchical/layout.h"

namespace lockstep::hierarchical_engine {

struct Options {
  std::string machine;                     ///< the name of this rank's machine: the same on all ranks that share memory
  std::string address;                     ///< the local address that other machines reach, never a wildcard
  std::chrono::milliseconds timeout;       ///< of an operation
  std::chrono::milliseconds join_timeout;  ///< of forming the group
  /// It is Group that calls: by one thread at a time, and with contiguous tensors only, which Gloo's engine takes.
  bool for_group = true;
};

/// Collectives for CPU tensors of ranks on several machines: through shared memory within a machine, over Gloo between
/// machines. Every rank of the group must call; blocks until the group is formed. The engine depends on where the ranks
/// are: shared memory alone if all are on one machine, Gloo alone if each is on a machine of its own and it may.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const Options& options);

/// The two carriers between machines: one for the engine's own messages, one for the program's messages from rank to
/// rank.
struct Carriers {
  std::shared_ptr<Carrier> collectives, messages;
};
struct Timeouts {
  std::chrono::milliseconds operation;
  std::chrono::milliseconds joining;  ///< of forming the group
};

/// The engine over carriers that are there already, for ranks on two machines or more. Every rank of the group must
/// call; blocks until the ranks of each machine have met. `name` is the backend's.
c10::intrusive_ptr<c10d::Backend> make_backend_over(Carriers carriers, const c10::intrusive_ptr<c10d::Store>& store,
                                                    const Layout& layout, const Timeouts& timeouts,
                                                    const std::string& name, bool several_callers = false);

/// Another backend with the engine of `backend`, whose operations have another timeout: what both are called for is one
/// sequence of operations. Null if `backend` is of another kind.
c10::intrusive_ptr<c10d::Backend> share_group_of(const c10d::Backend& backend, std::chrono::milliseconds timeout);

}  // namespace lockstep::hierarchical_engine
