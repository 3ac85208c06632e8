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

/// What belongs to this rank alone: its random states and the parts added as kEachRank.
/// `virtual_ranks`: null if there are none.
c10::impl::GenericDict state_of_rank(const std::vector<CheckpointPart>& parts, const VirtualRanks* virtual_ranks);
/// Throws Error if weights that ranks share are not what their optimizer has stepped.
void check_shared_weights();
/// Throws Error if a tensor in `state` holds something else for a while, such as averages of weights: a run that went on
/// from it would have lost its own.
void check_own_weights(const c10::impl::GenericDict& state);
/// The step, and of what run it is: with virtual ranks their number and that of threads.
void insert_step(c10::impl::GenericDict& whole, int64_t step, const VirtualRanks* virtual_ranks);

/// Saves on all ranks: each packs what is its own and sends it to rank 0, with a hash of every tensor that should be
/// the same everywhere; rank 0 compares the hashes, reads and copies all tensors, and tells the others whether that
/// went well; they go on training while a thread of rank 0 writes the copy. Where each rank has a slice of an
/// optimizer's state only, the others send theirs piece by piece while rank 0 copies or writes.
class CheckpointSaver {
 public:
  /// Makes the folder now rather than at the first save, hours later. Throws StorageError on all ranks.
  CheckpointSaver(std::string folder, Group group, const CheckpointerOptions& options);
  /// Waits for the writer.
  ~CheckpointSaver();

  const CheckpointFolder& folder() const { return folder_; }
  /// Of the newest checkpoint that was in the folder when this was made, on all ranks; -1: none.
  int64_t step_found() const { return step_found_; }
  /// Removes what was found there. All ranks call it. Throws StorageError on all ranks.
  void clear_folder();

  /// All ranks call it. kFailed or kDiverged where the state cannot be saved; a disk that fails is a warning of rank 0.
  /// `problem`: why this rank must not save that step; "" if it may.
  CheckpointMessage save(const std::vector<CheckpointPart>& parts, int64_t step, std::optional<double> score,
                         const std::string& problem);
  /// Waits for the writer.
  void wait();
  /// Waits until all is written. Throws StorageError on all ranks if the last save failed.
  void finish();

 private:
  bool is_main() const { return group_.rank() == 0; }
  CheckpointMessage collect(std::vector<std::string> sent, const c10::impl::GenericDict& common, bool in_slices,
                            int64_t step, std::optional<double> score);
  void start_write(std::unique_ptr<ObjectWriter> next, int64_t step, std::optional<double> score);
  void write(const ObjectWriter& object, int64_t step, std::optional<double> score);

  const Group group_;
  const CheckpointerOptions options_;

  int64_t step_found_ = -1;

  // Rank 0: the writer's while it runs, ours after wait().
  CheckpointFolder folder_;
  std::unique_ptr<ObjectWriter> next_;  ///< waits for the other ranks' slices
  std::unique_ptr<ObjectWriter> snapshot_;
  std::string last_failure_;  // of the last save

  std::thread writer_;
};

}  // namespace lockstep
