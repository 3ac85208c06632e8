#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/mutex.h"

namespace lockstep::mpi_engine {

/// A rank's copy of the board that all ranks write: keys with values, and counters. A writer sends a note to all
/// others, and each applies it to its copy. Notes of one rank arrive in the order of writing, notes of different ranks
/// in any order. So only one rank may set a key, and a counter's value is the one known here so far. Any thread may use
/// it.
class Board {
 public:
  /// Write to this copy, and return the note for the other ranks.
  std::string set(const std::string& key, const std::string& value);
  std::string add(const std::string& key, int64_t amount);
  void apply(const std::string& note);

  std::optional<std::string> get(const std::string& key) const;
  void erase(const std::string& key);
  size_t size() const;
  /// Increases with every change.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint64_t> version_{0};  ///< released after a change
  mutable Mutex mutex_;
  std::map<std::string, std::string> values_ LOCKSTEP_GUARDED_BY(mutex_);  ///< counters as text
};

}  // namespace lockstep::mpi_engine
