#pragma once

#include <deque>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "base/mutex.h"
#include "collectives/gloo/flight_recorder.h"

namespace lockstep::gloo_engine {

/// The collectives of this rank that may still run, whether or not a thread will wait for them. Any thread may call.
class PendingWorks {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Adds a collective, and forgets those that have succeeded.
  void add(Entry entry, WorkPtr work);
  /// Forgets a collective whose result, or failure, a thread has got.
  void forget(uint64_t number);
  /// The number of the first one that has not succeeded; 0: there is none.
  uint64_t first();

  /// Waits until all have succeeded, one has failed or does not match, or the deadline. Returns what is wrong with the
  /// first that has not succeeded; empty: all have.
  std::string finish(FlightRecorder& recorder, const Deadline& deadline);

 private:
  struct One {
    Entry entry;
    WorkPtr work;
  };
  std::optional<One> front();
  void forget_succeeded() LOCKSTEP_REQUIRES(mutex_);

  Mutex mutex_;
  std::deque<One> works_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::gloo_engine
