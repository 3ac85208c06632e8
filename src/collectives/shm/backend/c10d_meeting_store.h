#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
#include "collectives/cause.h"
#include "rendezvous/meeting_store.h"

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
    translated([&] { store_->wait(keys, timeout); });
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lockstep::shm_engine
