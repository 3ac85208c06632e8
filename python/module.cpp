// The Python module lockstep._C: one function that makes a backend, and an exit handler that ends the backend's
// threads. It refuses to be loaded with a torch other than the one it was built with: with a changed virtual table
// calls would silently reach the wrong function.

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "collectives/shm/backend/shm_backend.h"

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

}  // namespace

PYBIND11_MODULE(_C, module) {
  check_torch();
  module.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, std::chrono::milliseconds timeout) {
        return lockstep::shm_engine::make_backend(store, rank, world_size, timeout, "lockstep", /*writes_page=*/true);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  // A thread that wants Python's lock while the interpreter shuts down is unwound by force, through destructors that
  // may not throw: the process would abort.
  pybind11::module_::import("atexit").attr("register")(
      pybind11::cpp_function([] { lockstep::shm_engine::end_futures(kCallbackTimeout); },
                             pybind11::call_guard<pybind11::gil_scoped_release>()));
}
