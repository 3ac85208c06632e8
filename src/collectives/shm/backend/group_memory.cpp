#include "collectives/shm/backend/group_memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include <ATen/ATen.h>

#include "base/error.h"
#include "collectives/shm/backend/shm_backend.h"

namespace lockstep::shm_engine {
namespace {

/// Precedes memory that all ranks own together: the number of ranks that still own it. It lies in the arena of rank 0,
/// which alone can free it, and does so when it allocates the next and finds that no rank uses it any longer.
struct alignas(64) Owners {
  std::atomic<uint32_t> count;  ///< released by a rank that lets go, acquired by rank 0 before the memory is reused
};
constexpr size_t kInFront = 4096;  // the memory after it stays page-aligned

/// A rank's part in it.
struct Share {
  std::shared_ptr<SharedSegment> segment;  ///< keeps the mapping; null: the block is this rank's own
  std::byte* block;
  ~Share() {
    reinterpret_cast<Owners*>(block)->count.fetch_sub(1, std::memory_order_acq_rel);
    if (!segment) std::free(block);
  }
};
void delete_share(void* share) { delete static_cast<Share*>(share); }

at::Tensor tensor_of(Share* share, int64_t elements, const at::TensorOptions& options) {
  at::DataPtr data(share->block + kInFront, share, delete_share, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(elements) * options.dtype().itemsize(), std::move(data),
      /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, options).set_(at::Storage(std::move(storage)), 0, {elements}, {1});
}

}  // namespace

int GroupMemory::ranks_here() const { return group_.getSize(); }
int GroupMemory::rank_here() const { return group_.getRank(); }

void GroupMemory::forget() {
  const MutexLock lock(mutex_);
  owned_together_.clear();
}

void GroupMemory::give_back_unowned() {
  const MutexLock lock(mutex_);
  std::erase_if(owned_together_, [&](std::byte* block) {
    if (reinterpret_cast<Owners*>(block)->count.load(std::memory_order_acquire) != 0) return false;
    group_.core().free(block);
    return true;
  });
}

at::Tensor GroupMemory::allocate_together(int64_t elements, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(elements) * options.dtype().itemsize();
  constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t place = kNone;
  std::string failure = "rank 0 could not get " + std::to_string(bytes) + " bytes";
  if (group_.getRank() == 0) {
    give_back_unowned();
    try {
      std::byte* block = group_.core().allocate(kInFront + bytes);
      std::memset(block + kInFront, 0, bytes);
      new (block) Owners{static_cast<uint32_t>(group_.getSize())};
      place = group_.core().arena()->offset(block);
      const MutexLock lock(mutex_);
      owned_together_.push_back(block);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  group_.run({.kind = shm::OperationKind::kBroadcast,
              .type = shm::DataType::kUInt8,
              .count = sizeof place,
              .input = &place,
              .output = &place});
  if (place == kNone) throw LimitError("memory for all ranks together: " + failure);
  std::byte* block = group_.core().memory_of(0, place);
  return tensor_of(new Share{group_.core().world().segment(0), block}, elements, options);
}

std::vector<std::byte*> GroupMemory::address_everywhere(const at::Tensor& mine) {
  const auto* memory = static_cast<const std::byte*>(mine.const_data_ptr());
  TORCH_INTERNAL_ASSERT(group_.core().arena()->contains(memory, mine.nbytes()), "this memory is not the group's");
  const uint64_t place = group_.core().arena()->offset(memory);
  std::vector<uint64_t> places(static_cast<size_t>(group_.getSize()));
  group_.run({.kind = shm::OperationKind::kAllGather,
              .type = shm::DataType::kUInt8,
              .count = sizeof place,
              .input = &place,
              .output = places.data()});
  std::vector<std::byte*> addresses;
  for (int rank = 0; rank < group_.getSize(); ++rank)
    addresses.push_back(group_.core().memory_of(rank, places[static_cast<size_t>(rank)]));
  return addresses;
}

std::optional<uint64_t> GroupMemory::place_of(const at::Tensor& mine) const {
  const auto* memory = static_cast<const std::byte*>(mine.const_data_ptr());
  const auto& arena = *group_.core().arena();
  if (!arena.contains(memory, mine.nbytes())) return std::nullopt;
  return arena.offset(memory);
}

const std::byte* GroupMemory::memory_of(int rank, uint64_t place) const { return group_.core().memory_of(rank, place); }

}  // namespace lockstep::shm_engine

namespace lockstep {

at::Tensor allocate_alone(int64_t elements, const at::TensorOptions& options) {
  using namespace shm_engine;  // NOLINT
  const size_t bytes = static_cast<size_t>(elements) * options.dtype().itemsize();
  const size_t all = (kInFront + bytes + kInFront - 1) / kInFront * kInFront;
  auto* block = static_cast<std::byte*>(std::aligned_alloc(kInFront, all));
  if (block == nullptr)
    throw LimitError("memory for an optimizer: the machine cannot provide " + std::to_string(bytes) + " bytes");
  std::memset(block + kInFront, 0, bytes);
  new (block) Owners{1};
  return tensor_of(new Share{nullptr, block}, elements, options);
}

bool is_owned_together(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == shm_engine::delete_share;
}

}  // namespace lockstep
