#pragma once

#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/group.h>

#include "base/clock.h"

namespace lockstep {

struct Work::State {
  enum class Phase { kRunning, kDone, kFailed };

  // Constant after construction.
  const char* operation;
  uint64_t sequence;
  int64_t bytes;
  at::ScalarType dtype;
  std::shared_ptr<Group::State> group;  ///< keeps the engine alive
  c10::intrusive_ptr<c10d::Work> work;  ///< undefined: nothing was sent
  std::function<void()> finish;         ///< brings the result home on the waiting thread; may be empty
  Clock::time_point started = Clock::now();

  // Owned by the thread that waits.
  Phase phase = Phase::kRunning;
  std::string error;
};

}  // namespace lockstep
