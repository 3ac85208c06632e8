// lockstep._C: machines that synchronise every many steps. The options are Python's; the rest is the C++ class.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include <lockstep/diloco.h>

#include "python_replica.h"

namespace lockstep::python {
namespace {

namespace py = pybind11;

using Unlocked = py::call_guard<py::gil_scoped_release>;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A DiLoCo, and the replica that it must not outlive.
struct PythonDiLoCo {
  std::shared_ptr<PythonReplica> replica;
  DiLoCo diloco;
};

DiLoCoOptions diloco_options_of(const py::dict& from) {
  DiLoCoOptions options;
  const auto take = [&](const char* name, auto& field) {
    field = from[name].cast<std::remove_reference_t<decltype(field)>>();
  };
  take("sync_every", options.sync_every);
  take("fragments", options.fragments);
  take("overlap_steps", options.overlap_steps);
  take("mixing", options.mixing);
  take("wire", options.wire);
  take("error_feedback", options.error_feedback);
  take("outer_lr", options.outer_lr);
  take("outer_momentum", options.outer_momentum);
  take("nesterov", options.nesterov);
  take("max_nonfinite_rounds", options.max_nonfinite_rounds);
  return options;
}

std::unique_ptr<PythonDiLoCo> make_diloco(std::shared_ptr<PythonReplica> replica, const Group& group,
                                          const py::dict& from) {
  DiLoCoOptions options = diloco_options_of(from);
  const py::gil_scoped_release unlocked;
  PythonReplica& model = *replica;
  return std::unique_ptr<PythonDiLoCo>(new PythonDiLoCo{std::move(replica), DiLoCo(model, group, std::move(options))});
}

Tensors tensors_of(const StateDict& state) {
  Tensors tensors;
  for (const auto& item : state) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

StateDict state_of_tensors(const Tensors& tensors) {
  StateDict state;
  for (const auto& [name, tensor] : tensors) state.insert(name, tensor);
  return state;
}

}  // namespace

void bind_diloco(py::module_& module) {
  py::enum_<Wire>(module, "Wire")
      .value("fp32", Wire::kFloat32)
      .value("bf16", Wire::kBFloat16)
      .value("int8", Wire::kInt8)
      .value("int4", Wire::kInt4);
  py::class_<DiLoCoStats>(module, "DiLoCoStats")
      .def_readonly("steps", &DiLoCoStats::steps)
      .def_readonly("rounds", &DiLoCoStats::rounds)
      .def_readonly("bytes_sent", &DiLoCoStats::bytes_sent)
      .def_readonly("wait_seconds", &DiLoCoStats::wait_seconds)
      .def_readonly("took_part", &DiLoCoStats::took_part)
      .def_readonly("rounds_by_machine", &DiLoCoStats::rounds_by_machine);
  py::class_<PythonDiLoCo>(module, "DiLoCo")
      .def(py::init(&make_diloco))
      .def(
          "step", [](PythonDiLoCo& of) { return of.diloco.step(); }, Unlocked())
      .def(
          "synchronise", [](PythonDiLoCo& of) { of.diloco.synchronise(); }, Unlocked())
      .def(
          "finish", [](PythonDiLoCo& of) { of.diloco.finish(); }, Unlocked())
      .def("stats", [](const PythonDiLoCo& of) { return of.diloco.stats(); })
      .def(
          "state_dict", [](PythonDiLoCo& of) { return tensors_of(of.diloco.state_dict()); }, Unlocked())
      .def(
          "load_state_dict",
          [](PythonDiLoCo& of, const Tensors& state) { of.diloco.load_state_dict(state_of_tensors(state)); },
          Unlocked())
      .def(
          "load_from_ranks",
          [](PythonDiLoCo& of, const std::vector<Tensors>& ranks) {
            std::vector<StateDict> states;
            for (const Tensors& tensors : ranks) states.push_back(state_of_tensors(tensors));
            of.diloco.load_from_ranks(states);
          },
          Unlocked())
      .def("fits_ranks",
           [](const PythonDiLoCo& of, const Tensors& state) { return of.diloco.fits_ranks(state_of_tensors(state)); });
}

}  // namespace lockstep::python
