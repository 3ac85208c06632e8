#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::shm {

/// Called before every access to a word of shared memory.
void before_access(const void* word, bool writes);

/// A word like std::atomic<uint64_t> that lets the explorer choose which rank runs next before each access.
class SteppedWord {
 public:
  constexpr SteppedWord() = default;
  uint64_t load(std::memory_order = std::memory_order_seq_cst) const {
    before_access(this, false);
    return word_.load();
  }
  void store(uint64_t value, std::memory_order = std::memory_order_seq_cst) {
    before_access(this, true);
    word_.store(value);
  }
  uint64_t fetch_or(uint64_t value, std::memory_order = std::memory_order_seq_cst) {
    before_access(this, true);
    return word_.fetch_or(value);
  }
  bool compare_exchange_strong(uint64_t& expected, uint64_t value) {
    before_access(this, true);
    return word_.compare_exchange_strong(expected, value);
  }

 private:
  std::atomic<uint64_t> word_{0};
};

}  // namespace lockstep::shm
