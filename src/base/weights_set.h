#pragma once

#include <cstdint>

namespace lockstep {

/// Notes that this library has set parameters of this process as the program asked it to: from a state, or to those of
/// another rank. Any thread may call.
void note_weights_set();
/// How often that was.
uint64_t times_weights_were_set();

}  // namespace lockstep
