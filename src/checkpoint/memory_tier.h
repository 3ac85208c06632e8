#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/checkpointer.h>
#include <lockstep/group.h>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/memory/mapped_slots.h"
#include "checkpoint/memory_machines.h"
#include "checkpoint/memory_room.h"
#include "checkpoint/object_writer.h"
#include "checkpoint/slot_reader.h"

namespace lockstep {

/// Checkpoints in the launcher's memory, from which the ranks of a restart continue.
///
/// State that is equal on all ranks is one image, the bytes of a .pt file; each rank writes its range of it straight
/// from the tensors, and its slices of what lies in slices on the ranks. Behind the image each rank stores its own
/// state, and rank 0 also stores parts taken from rank 0 alone. Each save begins with a small message in which ranks
/// compare everything except tensor data, and a sample of that (memory_agreement.h); the first save of a start compares
/// all of it. On several machines each one holds the whole image, except slices, and ranks exchange their own states
/// (memory_machines.h). SlotWriter decides which rank writes when.
class MemoryTier {
 public:
  /// Null if the program wants no tier, or can do without it and there is no memory (rank 0 warns). Otherwise throws
  /// Error on all ranks. `folder` distinguishes this Checkpointer from others.
  static std::unique_ptr<MemoryTier> make(const std::string& folder, const Group& group,
                                          const CheckpointerOptions& options);
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  bool is_due(int64_t step) const { return !gave_up_ && step - last_step_ >= every_; }
  /// Called when the state of `step` was saved or resumed.
  void start_after(int64_t step) {
    last_step_ = step;
    gathered_ = false;  // some tensors are new
  }
  /// Saves. Throws Error on all ranks if there is too little memory, unless the program can do without the tier, which
  /// is then given up. Throws Error on all ranks, before anything is written, if their steps or states differ, or one
  /// of them cannot save. `problem` is the reason why this rank must not save that step; "" if it may.
  /// REQUIRES: all ranks call it.
  void save(const std::vector<CheckpointPart>& parts, int64_t step, std::string problem);

  /// The newest readable state, on every machine; for rank 0.
  /// REQUIRES: all ranks call it, while none saves.
  std::optional<WholeSlot> newest_intact() const;
  /// The state with that sequence, of which parts in slices have only what `parts` use on this rank. Throws
  /// RefusedInput on all ranks. REQUIRES: all ranks call it, while none saves. The state is whole on this machine.
  CheckpointImage image(uint64_t sequence, const std::vector<CheckpointPart>& parts) const;

 private:
  MemoryTier(std::unique_ptr<MappedSlots> memory, MemoryMachines machines, const std::string& folder,
             const Group& group, const CheckpointerOptions& options);

  struct Saved;
  bool has_room(const Saved& saved);
  bool reserve(const c10::impl::GenericDict& common, const MemoryRoom::Sizes& sizes);
  void begin(const ImageSlices& slices);
  CheckpointMessage share(const std::function<void(CheckpointMessage&)>& say,
                          const std::function<void(const std::vector<CheckpointMessage>&)>& look) const;
  void wait_for_last_save(int64_t step) const;

  const Group group_;
  const std::unique_ptr<MappedSlots> memory_;
  MemoryMachines machines_;
  const std::string folder_;  ///< of the checkpoints on disk
  const uint64_t owner_;
  const int64_t every_;
  const bool may_give_up_;
  MemoryRoom room_;
  bool gave_up_ = false;
  int64_t last_step_ = 0;
  std::optional<SlotWriter> writer_;   // from the first save on
  std::array<bool, 2> released_ = {};  // by slot: what this machine does not hold, since there was room
  bool gathered_ = false;              // the tensors lie in huge pages, as far as the kernel allowed
};

}  // namespace lockstep
