#pragma once

#include <chrono>
#include <optional>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::python {

enum class EngineUse {
  kBackend,  ///< torch.distributed calls it, and it writes the rank's page
  kGroup,    ///< a Group calls it, which writes the page itself
};

/// The engine for CPU tensors of these ranks, wherever they are: shared memory on one machine, else that within each
/// and Gloo between them. Every rank calls it; waits for the others, without Python's lock.
c10::intrusive_ptr<c10d::Backend> make_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                              std::chrono::milliseconds timeout, EngineUse use);

/// For a Group, the engine of torch's `backend` if that is one of these: the calls of both are one sequence. Null if it
/// is another's. `timeout`: of an operation; null, that of `backend`.
c10::intrusive_ptr<c10d::Backend> shared_engine(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                std::optional<std::chrono::milliseconds> timeout);

}  // namespace lockstep::python
