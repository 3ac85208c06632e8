#include "collectives/call_guard.h"

#include <string>

#include "base/error.h"

namespace lockstep {

void CallGuard::refuse_child(const char* operation) {
  throw Error(
      std::string(operation) +
      ": this group belongs to the process that made it, not to a child it forked; make another group in the child");
}

void CallGuard::refuse(int rank, const char* operation) const {
  throw Error(
      std::string(operation) + " was called on rank " + std::to_string(rank) + " while another thread of it was in " +
      caller_.operation_.load(std::memory_order_relaxed) +
      " of the same group. The ranks' operations are matched by their order, so only one thread at a time may call "
      "a group: give the other thread a subgroup of its own, or let the threads take turns in the same order on "
      "every rank.");
}

}  // namespace lockstep
