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
  std::string machine;                     ///< the name of this rank's machine, the same on all ranks that share memory
  std::string address;                     ///< the local address that other machines reach, never a wildcard
  std::chrono::milliseconds timeout;       ///< of an operation
  std::chrono::milliseconds join_timeout;  ///< of forming the group
  /// The caller is Group: one thread at a time, and only contiguous tensors, which Gloo's engine accepts.
  bool for_group = true;
};

/// Collectives for CPU tensors of ranks on several machines: through shared memory within a machine, over Gloo between
/// machines. Blocks until the group is formed. The engine depends on the placement of ranks: shared memory alone if all
/// are on one machine, Gloo alone if each is on its own machine and the options allow it.
/// REQUIRES: every rank of the group calls it.
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

/// The engine over existing carriers, for ranks on two or more machines. Blocks until the ranks of each machine have
/// met. `name` is the backend's.
/// REQUIRES: every rank of the group calls it.
c10::intrusive_ptr<c10d::Backend> make_backend_over(Carriers carriers, const c10::intrusive_ptr<c10d::Store>& store,
                                                    const Layout& layout, const Timeouts& timeouts,
                                                    const std::string& name, bool several_callers = false);

/// A second backend on the engine of `backend`, with another timeout. Operations of both form one sequence. Null if
/// `backend` is of another kind.
c10::intrusive_ptr<c10d::Backend> share_group_of(const c10d::Backend& backend, std::chrono::milliseconds timeout);

}  // namespace lockstep::hierarchical_engine
