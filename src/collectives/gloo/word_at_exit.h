#pragma once

#include <memory>

#include "collectives/gloo/flight_recorder.h"

namespace lockstep::gloo_engine {

/// Lets std::exit(), which destroys nothing on the stack of its thread, leave the recorder's word if this thread calls
/// it.
void leave_word_at_exit(const std::shared_ptr<FlightRecorder>& recorder);

}  // namespace lockstep::gloo_engine
