#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/checkpointer.h>
#include <lockstep/group.h>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// Saves on all ranks: each packs what is its own and sends it to rank 0, with a hash of every tensor that should be
/// the same everywhere; rank 0 compares the hashes, reads and copies all tensors, and tells the others whether that
/// went well; they go on training while a thread of rank 0 writes the copy.
class CheckpointSaver {
 public:
  /// Makes the folder now rather than at the first save, hours later. Throws StorageError on all ranks.
  CheckpointSaver(std::string folder, Group group, const CheckpointerOptions& options);
  /// Waits for the writer.
  ~CheckpointSaver();

  const CheckpointFolder& folder() const { return folder_; }

  /// All ranks call it. kFailed or kDiverged where the state cannot be saved; a disk that fails is a warning of rank 0.
  CheckpointMessage save(const std::vector<CheckpointPart>& parts, int64_t step, std::optional<double> score);
  /// Waits until all is written. Throws StorageError on all ranks if the last save failed.
  void finish();

 private:
  bool is_main() const { return group_.rank() == 0; }
  void wait();
  CheckpointMessage collect(std::vector<std::string> sent, const c10::impl::GenericDict& common, int64_t step,
                            std::optional<double> score);
  void start_write(const c10::IValue& object, int64_t step, std::optional<double> score);
  void write(const ObjectWriter& object, int64_t step, std::optional<double> score);

  const Group group_;
  const CheckpointerOptions options_;

  // Rank 0: the writer's while it runs, ours after wait().
  CheckpointFolder folder_;
  std::unique_ptr<ObjectWriter> snapshot_;
  std::string last_failure_;  // of the last save

  std::thread writer_;
};

}  // namespace lockstep
