#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "base/interruption.h"
#include "collectives/cause.h"
#include "collectives/shm/segment/bootstrap.h"
#include "rendezvous/generation.h"
#include "rendezvous/meeting_store.h"
#include "rendezvous/text_exchange.h"

namespace lockstep::shm_engine {

/// A c10d::Store as a MeetingStore. Its errors become Errors, without LibTorch's stack traces.
class C10dMeetingStore final : public MeetingStore {
  template <typename Call>
  static auto translated(const Call& call) {
    try {
      return call();
    } catch (const std::exception& cause) {
      throw Error(cause_of(cause));
    }
  }

 public:
  explicit C10dMeetingStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    translated([&] { store_->set(key, value); });
  }
  std::string get(const std::string& key) override {
    return translated([&] { return store_->get_to_str(key); });
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return translated([&] { return store_->add(key, amount); });
  }
  bool check(const std::string& key) override {
    return translated([&] { return store_->check({key}); });
  }
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    if (!can_be_interrupted()) return translated([&] { store_->wait(keys, timeout); });
    const auto start = Clock::now();
    while (!wait_for_a_while(keys, timeout - std::chrono::floor<std::chrono::milliseconds>(Clock::now() - start)))
      check_for_interruption();
  }

 private:
  /// Whether the keys have arrived. Throws when all the time `left` has passed without them.
  bool wait_for_a_while(const std::vector<std::string>& keys, std::chrono::milliseconds left) {
    constexpr std::chrono::milliseconds kWhile{200};
    if (left <= kWhile) {
      translated([&] { store_->wait(keys, std::max(left, std::chrono::milliseconds(1))); });
      return true;
    }
    const auto start = Clock::now();
    try {
      store_->wait(keys, kWhile);
      return true;
    } catch (const std::exception& cause) {
      if (Clock::now() - start < kWhile / 2) throw Error(cause_of(cause));  // not a timeout
    }
    return false;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

/// lockstep::exchange_texts over a store of c10d's.
inline shm::AllGather exchange_over(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                                    std::chrono::milliseconds timeout) {
  return exchange_texts(std::make_shared<C10dMeetingStore>(std::move(store)), rank, world_size, timeout);
}

/// lockstep::agree_on_generation in a store of c10d's.
inline Generation agree_on_generation(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  C10dMeetingStore meeting(c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store));
  return lockstep::agree_on_generation(meeting, rank, world_size, timeout);
}

}  // namespace lockstep::shm_engine
