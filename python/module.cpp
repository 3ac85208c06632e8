// The Python module lockstep._C: a function that makes a backend, the C++ half of lockstep.attach() and its optimizer,
// and an exit handler that ends the backend's threads. It refuses to be loaded with a torch other than the one it was
// built with: with a changed virtual table calls would silently reach the wrong function.

#include <algorithm>
#include <functional>

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/environment.h"
#include "base/error.h"
#include "base/machine_name.h"
#include "base/usable_cores.h"
#include "collectives/hierarchical/hierarchical_backend.h"
#include "collectives/shm/backend/generation.h"
#include "collectives/shm/backend/shm_backend.h"
#include "collectives/shm/backend/store_exchange.h"
#include "collectives/shm/layout.h"
#include "collectives/shm/reduce.h"
#include "collectives/tcp.h"
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

using Store = c10::intrusive_ptr<c10d::Store>;

/// Whether the ranks of the group are on several machines. Ranks that met without MASTER_ADDR are on one: they need
/// not ask each other, and if they are not, their hosts' names are in the error.
bool on_several_machines(const Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  if (world_size == 1 || !lockstep::Environment::from_process().master_addr) return false;
  const auto machines = lockstep::shm_engine::exchange_over(store, rank, world_size, timeout)(lockstep::machine_name());
  return std::adjacent_find(machines.begin(), machines.end(), std::not_equal_to<>()) != machines.end();
}

c10::intrusive_ptr<c10d::Backend> make_backend(const Store& store, int rank, int world_size,
                                               std::chrono::milliseconds timeout) {
  if (!on_several_machines(store, rank, world_size, timeout))
    return lockstep::shm_engine::make_backend(store, rank, world_size, timeout, "lockstep", /*writes_page=*/true);
  // torchrun's agent keeps its store when it starts ranks again, and the engine's keys are always the same.
  const auto found = lockstep::shm_engine::agree_on_generation(*store, rank, world_size, timeout);
  if (!found.missing.empty())
    throw lockstep::Error("rank " + std::to_string(found.missing.front()) +
                          " did not come to form the group; see its output for why");
  constexpr int kAnyPort = 9;  // nothing is sent there
  const std::string master = *lockstep::Environment::from_process().master_addr;
  return lockstep::hierarchical_engine::make_backend(
      c10::make_intrusive<c10d::PrefixStore>(found.prefix, store), rank, world_size,
      {lockstep::machine_name(), lockstep::address_towards(master, kAnyPort), timeout, timeout, /*gloo_alone=*/false});
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  check_torch();
  module.def("make_backend", &make_backend, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("describe", &describe);
  lockstep::python::bind_replica(module);
  lockstep::python::bind_optimizer(module);
  // A thread that wants Python's lock while the interpreter shuts down is unwound by force, through destructors that
  // may not throw: the process would abort.
  pybind11::module_::import("atexit").attr("register")(
      pybind11::cpp_function([] { lockstep::shm_engine::end_futures(kCallbackTimeout); },
                             pybind11::call_guard<pybind11::gil_scoped_release>()));
}
