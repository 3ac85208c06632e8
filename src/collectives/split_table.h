#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/error.h>

namespace lockstep {

/// Every rank has found the same difference between the ranks' calls, and no data was moved.
struct RanksDiffer : Error {
  using Error::Error;
};

/// The number of elements that each rank of an uneven all_to_all sends to and expects from every other. Ranks exchange
/// their rows before any data, because an engine that gets a different size than expected fails late, on one rank, or
/// not at all.
class SplitTable {
 public:
  explicit SplitTable(int world_size) : size_(static_cast<size_t>(world_size)), numbers_(2 * size_ * size_) {}

  /// A rank's row: the numbers that it sends to each rank, then the numbers that it expects from each.
  uint64_t* row(int rank) { return numbers_.data() + static_cast<size_t>(rank) * numbers_in_row(); }
  size_t numbers_in_row() const { return 2 * size_; }
  uint64_t* data() { return numbers_.data(); }

  /// Throws RanksDiffer, on all ranks, unless each rank expects from each the number that this one sends. Records it on
  /// the rank's page.
  /// REQUIRES: all rows are filled, and equal on all ranks.
  void check() const;

 private:
  size_t size_;
  std::vector<uint64_t> numbers_;
};

}  // namespace lockstep
