#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::gloo_engine {

/// A collective as every rank must call it: its number among those of the group, from 1, and its text, such as
/// "all_reduce(Float, 43 elements, sum)".
struct Call {
  uint64_t number;
  std::string text;
};

/// The collectives that this rank has called, and what ranks tell each other of them through the store once one stands
/// still or has failed. For one that goes on nothing is sent. Used by the thread that calls.
class Calls {
 public:
  /// Before the group is formed: takes back what this rank told in an earlier group over the same store.
  Calls(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), world_size_(world_size) {
    store_->deleteKey(key(rank_));
  }

  Call add(std::string text);
  /// Gloo's name for the messages of the call that was added last. It depends on all calls so far: after one that
  /// differs nothing meets any more, so that no rank takes the data of one for that of another, and a rank that only
  /// sent, which never waits, is found at the next.
  uint32_t tag() const { return static_cast<uint32_t>(count_) << 16 | ((hash_ >> 16 ^ hash_) & 0xffff); }

  /// This rank waits in `call`: tells the others, and compares what they told. Returns what does not match; "" if
  /// nothing is known to.
  std::string compare(const Call& call);
  /// This rank's `call` has failed. Tells the others, and waits for what they say until all have or `patience` has
  /// passed. Returns what does not match, or where each rank is.
  std::string after_failure(const Call& call, std::chrono::milliseconds patience);

 private:
  /// What a rank has told.
  struct Account {
    bool has_failed = false;
    Call now{};                ///< in which it waits, or which failed
    std::deque<Call> history;  ///< the last ones, `now` among them

    std::string packed() const;
    static Account unpacked(const std::string& bytes);
    /// The text of the call of that number; null if it is not known.
    const std::string* text_of(uint64_t number) const;
  };
  /// Of each rank; none: it has told nothing.
  using Accounts = std::vector<std::optional<Account>>;

  std::string key(int rank) const { return "calls/" + std::to_string(rank); }
  /// Tells what this rank does, and reads what the others told.
  Accounts exchange(const Account& own) const;
  Account own_account(const Call& call, bool has_failed) const { return {has_failed, call, history_}; }
  static std::string mismatch(const Accounts& accounts);
  static std::string places(const Accounts& accounts);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  uint64_t count_ = 0;
  uint32_t hash_ = 2166136261u;  ///< of all texts
  std::deque<Call> history_;
};

}  // namespace lockstep::gloo_engine
