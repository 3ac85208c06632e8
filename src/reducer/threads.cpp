#include "reducer/reducer.h"

// Threads that meet in one model. A thread whose first gradient comes while another waits for its reduction waits for
// the mutex before it accumulates, so its gradient is added. Everything else is an error.

namespace lockstep {
namespace {

constexpr const char* kBesideStep =
    "a thread ran a backward of a model while another was between settling and stepping its ZeroRedundancyOptimizer; "
    "run step() and clip_grad_norm() when all backward passes of the model have ended, and the next backward after "
    "step() has returned";

constexpr const char* kTwoThreads =
    "was reached by the backward of one thread while that of another is still running; let one thread at a time run "
    "backward of a model, or give each thread a model of its own";

}  // namespace

void Reducer::look_at_thread(size_t parameter) {
  if (fixed_.tensors[parameter].is_cpu() && backward_.thread != std::this_thread::get_id())
    note_trouble(parameter, kTwoThreads);
}

void Reducer::note_beside_step() {
  message_.trouble = kBesideStep;
  message_.lasting = true;
}

Reducer::Stepping::Stepping(Reducer& reducer) : reducer_(reducer) { reducer_.stepped_by_ = std::this_thread::get_id(); }

Reducer::Stepping::~Stepping() { reducer_.stepped_by_ = std::thread::id(); }

bool Reducer::is_stepped_elsewhere() const {
  const std::thread::id stepper = stepped_by_;
  return stepper != std::thread::id() && stepper != std::this_thread::get_id();
}

std::string Reducer::backward_elsewhere() const {
  const MutexLock lock(mutex_);
  return is_in_backward_elsewhere() ? kBesideStep : "";
}

bool Reducer::is_in_backward_elsewhere() const {
  return backward_.phase == Phase::kInBackward && fixed_.on_cpu() && backward_.thread != std::this_thread::get_id();
}

}  // namespace lockstep
