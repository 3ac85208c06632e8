// The Python module lockstep._C: one function, which makes a backend.

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/utils/pybind.h>

#include "collectives/shm/backend/shm_backend.h"

PYBIND11_MODULE(_C, module) {
  module.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, std::chrono::milliseconds timeout) {
        return lockstep::shm_engine::make_backend(store, rank, world_size, timeout, "lockstep", /*keeps_page=*/true);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
