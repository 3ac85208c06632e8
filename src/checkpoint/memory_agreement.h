#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "checkpoint/object_writer.h"

namespace lockstep {

/// A rank's statement of the save to memory that it is about to make.
struct MemorySave {
  int64_t step = 0;
  std::string folder = {};                         ///< of the checkpoints on disk
  uint64_t layout = 0;                             ///< as in the SaveHeader
  const c10::impl::GenericDict* common = nullptr;  ///< state common to all ranks
  const ObjectWriter* sampled = nullptr;           ///< of it; null before the first save, which compares every bit
  std::string problem = {};                        ///< the reason why this rank cannot save; "" if it can
};

/// A comparison made for each save, in one small message: the step, the folder, all common state except tensor data,
/// and a few elements of every tensor. All ranks make it, and call check() before the save counts.
class MemorySaveComparison {
 public:
  /// Sends the compared values and returns.
  MemorySaveComparison(const Group& group, MemorySave mine);
  /// Throws Error on all ranks, naming the difference and the ranks, if they differ or one of them cannot save. One
  /// call suffices.
  void check();

 private:
  const Group group_;
  const MemorySave mine_;
  at::Tensor numbers_, all_;
  std::optional<Work> work_;
};

/// Compares every bit, except of what lies in slices on the ranks. Throws Error on all ranks, naming the first
/// difference. REQUIRES: all ranks call it.
void compare_memory_states(const Group& group, const c10::impl::GenericDict& common);

}  // namespace lockstep
