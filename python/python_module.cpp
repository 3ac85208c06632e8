#include "python_module.h"

#include <algorithm>
#include <unordered_set>

#include <torch/csrc/utils/pybind.h>

namespace lockstep::python {
namespace {

namespace py = pybind11;

/// A module's own dictionary, such as _parameters; entries that are None do not count.
std::vector<const PyObject*> held(const py::handle& module, const char* dictionary) {
  std::vector<const PyObject*> objects;
  for (const auto& [name, object] : py::dict(module.attr(dictionary)))
    if (!object.is_none()) objects.push_back(object.ptr());
  return objects;
}

}  // namespace

PythonModule::Layer PythonModule::Layer::of(const py::handle& module) {
  return {py::weakref(module), held(module, "_parameters"), held(module, "_buffers"), held(module, "_modules")};
}

bool PythonModule::Layer::is_edited() const {
  const py::object now = module();
  return now.is_none() || held(now, "_parameters") != parameters || held(now, "_buffers") != buffers ||
         held(now, "_modules") != children;
}

PythonModule::~PythonModule() {
  const py::gil_scoped_acquire lock;  // a replica that could not be made is destroyed without it
  layers_.clear();
  module_.release().dec_ref();
}

void PythonModule::remember() {
  const py::gil_scoped_acquire lock;
  layers_.clear();
  next_ = 0;
  edited_ = false;
  const py::object module = module_();
  if (module.is_none()) return;
  for (const py::handle& one : module.attr("modules")()) layers_.push_back(Layer::of(one));
}

void PythonModule::look() {
  const py::object module = module_();
  if (module.is_none()) return;
  for (size_t looked = 0; looked < std::min(kModulesAtOnce, layers_.size()) && !edited_; ++looked) {
    next_ = (next_ + 1) % layers_.size();
    edited_ = layers_[next_].is_edited();
  }
}

NamedTensors PythonModule::list(const char* method) const {
  const py::gil_scoped_acquire lock;
  const py::object module = module_();
  TORCH_CHECK(!module.is_none(), "the module of this replica was destroyed; attach to the new one");
  NamedTensors tensors;
  std::unordered_set<const c10::TensorImpl*> seen;  // a tensor that several layers share is listed once
  for (const py::handle& item : module.attr(method)()) {
    const auto named = item.cast<py::tuple>();
    auto tensor = named[1].cast<at::Tensor>();
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) tensors.emplace_back(named[0].cast<std::string>(), tensor);
  }
  return tensors;
}

}  // namespace lockstep::python
