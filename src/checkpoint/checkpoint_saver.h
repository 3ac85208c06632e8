#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/checkpointer.h>
#include <lockstep/group.h>

#include "base/virtual_ranks.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// This rank's own state: its random states and the parts added as kEachRank. `virtual_ranks` is null if none.
c10::impl::GenericDict state_of_rank(const std::vector<CheckpointPart>& parts, const VirtualRanks* virtual_ranks);
/// Throws Error if weights that ranks share have been changed by other code than their optimizer.
void check_shared_weights();
/// Throws Error if a tensor in `state` temporarily holds other values, such as averages of weights: a run resumed from
/// it would have lost its own.
void check_own_weights(const c10::impl::GenericDict& state);
/// Adds the step and, with virtual ranks, their number and the number of threads.
void insert_step(c10::impl::GenericDict& whole, int64_t step, const VirtualRanks* virtual_ranks);

/// Saves on all ranks. Each rank packs its own state and sends it to rank 0, with a hash of every tensor that should be
/// equal everywhere. Rank 0 compares the hashes, reads and copies all tensors, and tells the others whether that
/// succeeded. They continue training while a thread of rank 0 writes the copy. If each rank has only a slice of an
/// optimizer's state, the others send their slices piece by piece while rank 0 copies or writes.
class CheckpointSaver {
 public:
  /// Makes the folder now rather than at the first save, hours later. Throws StorageError on all ranks.
  CheckpointSaver(std::string folder, Group group, const CheckpointerOptions& options);
  /// Waits for the writer.
  ~CheckpointSaver();

  const CheckpointFolder& folder() const { return folder_; }
  /// The step of the newest checkpoint that was in the folder at construction, on all ranks; -1: none.
  int64_t step_found() const { return step_found_; }
  /// Removes the checkpoints found there. Throws StorageError on all ranks.
  /// REQUIRES: all ranks call it.
  void clear_folder();

  /// Saves. Returns kFailed or kDiverged if the state cannot be saved; a disk failure is a warning on rank 0. `problem`
  /// is the reason why this rank must not save that step; "" if it may.
  /// REQUIRES: all ranks call it.
  CheckpointMessage save(const std::vector<CheckpointPart>& parts, int64_t step, std::optional<double> score,
                         const std::string& problem);
  void wait();
  /// Waits until everything is written. Throws StorageError on all ranks if the last save failed.
  void finish();

 private:
  bool is_main() const { return group_.rank() == 0; }
  CheckpointMessage collect(std::vector<std::string> sent, const c10::impl::GenericDict& common, bool in_slices,
                            int64_t step, std::optional<double> score);
  /// `may_copy`: there is memory for a copy of everything.
  void start_write(std::unique_ptr<ObjectWriter> next, int64_t step, std::optional<double> score, bool may_copy = true);
  void write(const ObjectWriter& object, int64_t step, std::optional<double> score);

  const Group group_;
  const CheckpointerOptions options_;

  int64_t step_found_ = -1;

  // On rank 0: owned by the writer while it runs, by this object after wait().
  CheckpointFolder folder_;
  std::unique_ptr<ObjectWriter> next_;  ///< waits for the other ranks' slices
  std::unique_ptr<ObjectWriter> snapshot_;
  std::string last_failure_;  // of the last save

  std::thread writer_;
};

}  // namespace lockstep
