#pragma once

#include <vector>

#include <pybind11/pybind11.h>

#include "data_parallel/source.h"

namespace lockstep::python {

/// A Python nn.Module, as what a replica attaches to. It does not keep the module alive: the module keeps the replica.
///
/// An edit is looked for where Python's lock is held anyway, before an optimizer's step, and is_edited() says what was
/// found: it is asked at the end of backward, which must not wait for other threads of Python. Most edits are known
/// before that: torch tells _replica.py of everything that a module registers.
class PythonModule final : public Source {
 public:
  /// Needs Python's lock, like look().
  explicit PythonModule(const pybind11::object& module) : module_(module) {}
  ~PythonModule() override;
  PythonModule(const PythonModule&) = delete;
  PythonModule& operator=(const PythonModule&) = delete;

  NamedTensors parameters() const override { return list("named_parameters"); }
  NamedTensors buffers() const override { return list("named_buffers"); }
  const char* attaching_call() const override { return "attach()"; }
  bool is_edited() override { return edited_; }
  void remember() override;

  /// Looks at the next part of a large module, in microseconds.
  void look();

 private:
  static constexpr size_t kModulesAtOnce = 64;

  /// The direct contents of a module when remember() was called. Objects are compared, never used: the replica keeps
  /// the tensors alive, and a module that is gone was replaced.
  struct Layer {
    pybind11::weakref module;
    std::vector<const PyObject*> parameters, buffers, children;

    static Layer of(const pybind11::handle& module);
    bool is_edited() const;
  };

  NamedTensors list(const char* method) const;

  pybind11::weakref module_;
  std::vector<Layer> layers_;
  size_t next_ = 0;
  bool edited_ = false;
};

}  // namespace lockstep::python
