#pragma once

#include "base/mutex.h"
#include "collectives/machine_memory.h"

namespace lockstep::shm_engine {

class ShmBackend;

/// The memory that the ranks of a group share besides what operations need.
class GroupMemory final : public MachineMemory {
 public:
  /// `group` outlives the object.
  explicit GroupMemory(ShmBackend& group) : group_(group) {}

  int ranks_here() const override;
  int rank_here() const override;
  at::Tensor allocate_together(int64_t elements, const at::TensorOptions& options) override;
  std::vector<std::byte*> address_everywhere(const at::Tensor& mine) override;
  std::optional<uint64_t> place_of(const at::Tensor& mine) const override;
  const std::byte* memory_of(int rank, uint64_t place) const override;

  /// Called when the ranks have formed a new group. The old one's memory goes with its last tensor.
  void forget();

 private:
  void give_back_unowned();

  ShmBackend& group_;
  Mutex mutex_;
  /// On rank 0: memory made by allocate_together().
  std::vector<std::byte*> owned_together_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm_engine
