#pragma once

#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/group.h>

#include "base/clock.h"
#include "collectives/message_counts.h"
#include "collectives/shm/protocol/request.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// "all_reduce #12 (float32, 1000 elements, sum) failed on rank 0 of 2 after 0.3 s: <cause>", and a hint.
std::string describe_failure(const Work::State& operation, const std::exception& cause);

/// Goes on as a thread may whose next steps run on a device: with a tensor on a device, returns when all ranks are
/// known to have called the operation, and orders the current stream after it; with a tensor on the CPU, waits. Throws
/// what Work::wait() throws. What fails on the device later is thrown by the group's next operation; if there is none
/// within seconds, the process ends, before anything can read the result.
void order_after(const Work& work);

struct Work::State {
  enum class Phase { kRunning, kDone, kFailed };

  static State& of(const Work& work) { return *work.state_; }

  // Constant after construction.
  const char* operation;
  uint64_t sequence;
  shm::Call call;
  std::shared_ptr<Group::State> group;     ///< keeps the engine alive
  c10::intrusive_ptr<c10d::Work> work;     ///< null: nothing was sent
  std::function<void()> finish = nullptr;  ///< copies the result back, on the waiting thread; may be empty
  Clock::time_point started = coarse_now();
  std::string message = "";  ///< of a send or recv: "to rank 1, tag 7"
  MessageCounts::Message counted = {};
  uint64_t device_call = 0;          ///< its number among the group's DeviceCalls; 0: it is none of them
  RankStatus::Awaited awaited = {};  ///< shown on the rank's page while a thread waits; empty for a message

  // Owned by the waiting thread.
  Phase phase = Phase::kRunning;
  std::string error;
};

}  // namespace lockstep
