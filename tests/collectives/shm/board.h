#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

/// An all-gather of texts, as over a key-value store, for ranks that are threads or forked children of this process.
class Board {
 public:
  explicit Board(int ranks) : ranks_(ranks) {
    void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    shared_ = new (memory) Shared{};
  }
  ~Board() { ::munmap(shared_, sizeof(Shared)); }
  Board(const Board&) = delete;

  /// `round` counts the calls of this rank.
  std::vector<std::string> all_gather(int rank, int& round, const std::string& mine) {
    Slot& slot = shared_->slots[round % kRounds][rank];
    if (mine.size() > sizeof slot.text) throw std::runtime_error("text too long");
    std::memcpy(slot.text, mine.data(), mine.size());
    slot.size = mine.size();
    slot.ready.store(round + 1);
    std::vector<std::string> all;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (int r = 0; r < ranks_; ++r) {
      Slot& other = shared_->slots[round % kRounds][r];
      while (other.ready.load() < round + 1) {
        if (std::chrono::steady_clock::now() > end)
          throw std::runtime_error("rank " + std::to_string(r) + " stays away");
        ::usleep(100);
      }
      all.emplace_back(other.text, other.size);
    }
    ++round;
    return all;
  }

 private:
  static constexpr int kRounds = 64;  // never reused in a test
  struct Slot {
    std::atomic<int> ready;
    size_t size;
    char text[2032];
  };
  struct Shared {
    Slot slots[kRounds][kMaxRanks];
  };
  const int ranks_;
  Shared* shared_;
};

}  // namespace lockstep::shm
