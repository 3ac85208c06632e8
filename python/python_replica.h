#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <pybind11/pybind11.h>

#include <lockstep/replica.h>

namespace lockstep::python {

class PythonModule;

/// The result of lockstep.attach(), without its Python half. Made and destroyed with Python's lock held.
class PythonReplica : public Replica {
 public:
  PythonReplica(std::unique_ptr<PythonModule> source, const Group& group, DistributedDataParallelOptions options);

  /// Looks for edits of the module, which the next backward reports. Needs Python's lock.
  void look();
  /// The module is about to hold these tensors, too.
  void expect(const std::vector<at::Tensor>& tensors);

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
/// Adds the class of the machines' synchronisation.
void bind_diloco(pybind11::module_& module);

}  // namespace lockstep::python
