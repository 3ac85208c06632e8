#include "collectives/call_guard.h"

#include <string>

#include "base/error.h"
#include "base/shared_segment.h"
#include "base/thread_token.h"

namespace lockstep {

CallGuard::CallGuard(CurrentCaller& caller, int rank, unsigned fork_generation, const char* operation)
    : caller_(caller) {
  if (fork_generation != lockstep::fork_generation())
    throw Error(
        std::string(operation) +
        ": this group belongs to the process that made it, not to a child it forked; make another group in the child");
  const void* const here = thread_token();
  const void* other = nullptr;
  if (caller.thread_.compare_exchange_strong(other, here, std::memory_order_acquire)) {
    caller.operation_.store(operation, std::memory_order_relaxed);
  } else if (other == here) {
    within_ = true;
  } else {
    throw Error(
        std::string(operation) + " was called on rank " + std::to_string(rank) + " while another thread of it was in " +
        caller.operation_.load(std::memory_order_relaxed) +
        " of the same group. The ranks' operations are matched by their order, so only one thread at a time may call "
        "a group: give the other thread a subgroup of its own, or let the threads take turns in the same order on "
        "every rank.");
  }
}

}  // namespace lockstep
