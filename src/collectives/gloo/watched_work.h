#pragma once

#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "collectives/gloo/flight_recorder.h"
#include "collectives/gloo/pending_works.h"
#include "collectives/message_watch.h"

namespace lockstep::gloo_engine {

/// Never destroys an engine with operations that will never complete: its destructor would wait until they time out.
void leak(c10::intrusive_ptr<c10d::Backend> engine);

/// A collective that is examined when it makes no progress.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> inner, c10::intrusive_ptr<c10d::Backend> engine,
              std::shared_ptr<FlightRecorder> recorder, std::shared_ptr<MessageWatch> messages,
              std::shared_ptr<PendingWorks> pending, Entry entry)
      : inner_(std::move(inner)),
        engine_(std::move(engine)),
        recorder_(std::move(recorder)),
        messages_(std::move(messages)),
        pending_(std::move(pending)),
        entry_(std::move(entry)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  bool wait_watched();
  static constexpr std::chrono::milliseconds kFirstCheck{400}, kLongestPause{5000};

  bool is_done_within(std::chrono::milliseconds pause, Clock::time_point started);

  const c10::intrusive_ptr<c10d::Work> inner_;
  const c10::intrusive_ptr<c10d::Backend> engine_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<MessageWatch> messages_;
  const std::shared_ptr<PendingWorks> pending_;
  const Entry entry_;
};

}  // namespace lockstep::gloo_engine
