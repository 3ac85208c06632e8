#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <pybind11/pybind11.h>

#include <lockstep/replica.h>

namespace lockstep::python {

class PythonModule;

/// What lockstep.attach() gives, without its Python half. Made and destroyed with Python's lock held.
class PythonReplica : public Replica {
 public:
  PythonReplica(std::unique_ptr<PythonModule> source, const Group& group, DistributedDataParallelOptions options);

  /// The module is about to compute. Throws Error on all ranks if the module was edited without refresh().
  void look();

 private:
  explicit PythonReplica(std::pair<PythonModule*, std::unique_ptr<State>> made);

  PythonModule* const source_;  ///< owned by the State
};

/// A NoSyncGuard or an Accumulation, which Python ends at a time of its own.
class PythonGuard {
 public:
  explicit PythonGuard(NoSyncGuard guard) : guard_(std::move(guard)) {}
  void end() { guard_.reset(); }

 private:
  std::optional<NoSyncGuard> guard_;
};

/// Adds the classes of a replica to lockstep._C.
void bind_replica(pybind11::module_& module);
/// Adds the class of the optimizer.
void bind_optimizer(pybind11::module_& module);

}  // namespace lockstep::python
