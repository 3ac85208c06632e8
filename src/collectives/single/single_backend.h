#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::single_engine {

/// The engine of a world of one: every operation is an exact copy or does nothing.
c10::intrusive_ptr<c10d::Backend> make_backend();

}  // namespace lockstep::single_engine
