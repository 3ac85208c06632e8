#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/error.h>

#include "base/mutex.h"
#include "collectives/hierarchical/carrier.h"

namespace lockstep::hierarchical_engine {

/// A message failed: its connection broke, or it timed out.
struct BrokenLink : Error {
  using Error::Error;
};

/// A message to or from a rank of another machine, in flight.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = -1;
  bool is_sent = false;
};

/// The connections to the ranks of other machines. Messages between two ranks with one tag arrive in the order in which
/// they were sent. Used by one thread at a time, except for interrupt() and ask().
class Links {
 public:
  explicit Links(std::shared_ptr<Carrier> carrier) : carrier_(std::move(carrier)) {}

  /// Starts a message. The memory must stay valid until the message is finished or the carrier's break_off() was
  /// called.
  Transfer send(const void* data, size_t bytes, int to, uint32_t tag);
  Transfer receive(void* data, size_t bytes, int from, uint32_t tag);
  /// Waits. Throws BrokenLink naming the peer, or an Interruption.
  void finish(Transfer& transfer, std::chrono::milliseconds timeout);
  void finish(std::vector<Transfer>& transfers, std::chrono::milliseconds timeout) {
    for (Transfer& transfer : transfers) finish(transfer, timeout);
    transfers.clear();
  }

  /// Makes the current finish(), or the next one, throw. Any thread may call it.
  void interrupt();
  /// Makes a thread in finish() check whether it must stop waiting. Any thread may call it.
  void ask();
  Carrier& carrier() const { return *carrier_; }

 private:
  /// Whether a wait ended only because of ask(). Throws the Interruption, if there is one.
  bool was_only_asked();

  std::shared_ptr<Carrier> carrier_;

  Mutex mutex_;
  c10::intrusive_ptr<c10d::Work> awaited_ LOCKSTEP_GUARDED_BY(mutex_);
  bool interrupted_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool asked_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep::hierarchical_engine
