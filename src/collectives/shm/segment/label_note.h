#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace lockstep::shm {

/// The purpose of one operation (OperationLabel), in shared memory. Other ranks read it only for a message, so it costs
/// the writer some stores to memory that no other rank caches, and nothing for an operation without a label. A reader
/// that meets a writer gets no text.
class LabelNote {
 public:
  void store(uint64_t sequence, std::string_view text) {
    text = text.substr(0, sizeof words_ - 1);
    sequence_.store(0, std::memory_order_relaxed);
    // Pairs with the acquire fence of load(): a reader that sees a new word sees that the old number is gone.
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t at = 0; at <= text.size(); at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
      words_[at / 8].store(word, std::memory_order_relaxed);
    }
    sequence_.store(sequence, std::memory_order_release);  // to load(): the text is in place
  }

  /// Empty if the operation with that number has no label.
  std::string load(uint64_t sequence) const {
    if (sequence_.load(std::memory_order_acquire) != sequence) return "";  // from the end of store()
    char bytes[sizeof words_];
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes + 8 * i, &word, 8);
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // with the release fence of store()
    if (sequence_.load(std::memory_order_relaxed) != sequence) return "";
    return {bytes, ::strnlen(bytes, sizeof bytes - 1)};
  }

 private:
  static constexpr size_t kWords = 15;
  std::atomic<uint64_t> sequence_{0};  ///< of the operation; 0: none, or the words are being written
  std::atomic<uint64_t> words_[kWords] = {};
};

}  // namespace lockstep::shm
