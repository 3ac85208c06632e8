#pragma once

#include "support/ranks.h"

namespace lockstep::testing {

/// MPI was initialized with MPI_THREAD_MULTIPLE; else with MPI_THREAD_FUNNELED.
bool any_thread_may_call();

}  // namespace lockstep::testing
