// The Python module lockstep._C: a function that makes a backend, the C++ half of lockstep.attach(), its optimizer and
// its DiLoCo, and an exit handler that ends the backend's threads. It refuses to be loaded with a torch other than the
// one it was built with: with a changed virtual table calls would silently reach the wrong function.

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "base/usable_cores.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/segment/layout.h"
#include "python_engine.h"
#include "python_replica.h"

namespace {

/// How long a program that ends waits for its own callbacks.
constexpr std::chrono::seconds kCallbackTimeout{10};

/// Throws ImportError unless the torch that runs has the release, major.minor, of the one this was compiled with.
void check_torch() {
  const auto release = [](const std::string& version) {
    return version.substr(0, version.find('.', version.find('.') + 1));
  };
  const std::string running = pybind11::str(pybind11::module_::import("torch").attr("__version__"));
  if (release(running) != release(TORCH_VERSION))
    throw pybind11::import_error("it was built with torch " TORCH_VERSION);
}

/// For `python -m lockstep`.
pybind11::dict describe() {
  pybind11::dict facts;
  facts["built_with_torch"] = TORCH_VERSION;
  facts["kernels"] = lockstep::shm::name(lockstep::shm::best_instruction_set());
  facts["cpus"] = lockstep::allowed_cpus().size();
  facts["cpu_quota"] = lockstep::cgroup_cpu_quota();
  facts["most_ranks"] = lockstep::shm::kMaxRanks;
  return facts;
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               std::chrono::milliseconds timeout) {
  using namespace lockstep::python;  // NOLINT
  return make_engine(store, rank, world_size, timeout, EngineUse::kBackend);
}

c10::intrusive_ptr<c10d::Backend> make_unformed_backend(int rank, int world_size, std::chrono::milliseconds timeout) {
  return lockstep::shm_engine::make_unformed_backend(rank, world_size, timeout, "lockstep");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  check_torch();
  module.def("make_backend", &make_backend, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("make_unformed_backend", &make_unformed_backend);
  module.def("describe", &describe);
  lockstep::python::bind_replica(module);
  lockstep::python::bind_optimizer(module);
  lockstep::python::bind_diloco(module);
  // A thread that wants Python's lock while the interpreter shuts down is unwound by force, through destructors that
  // may not throw: the process would abort.
  pybind11::module_::import("atexit").attr("register")(
      pybind11::cpp_function([] { lockstep::shm_engine::end_futures(kCallbackTimeout); },
                             pybind11::call_guard<pybind11::gil_scoped_release>()));
}
