#pragma once

#include <string>
#include <utility>

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

// Makes a storage refuse to be read. LibTorch 2.11 and 2.12 cannot undo this, so there LibTorch's own check, which says
// less, covers storages without memory.

namespace lockstep::fully_sharded {

/// A storage whose memory comes later, or never.
inline c10::Storage empty_storage(int64_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
                                               c10::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr,
                                               /*resizable=*/false);
}

inline bool has_memory(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

template <typename Storage>
concept TakesRefusalsBack = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (TakesRefusalsBack<Storage>) storage.clear_data_ptr_access_error_msg_();
}

/// REQUIRES: the storage has no memory.
template <typename Storage>
void refuse_access(Storage& storage, std::string why) {
  if constexpr (TakesRefusalsBack<Storage>)
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

}  // namespace lockstep::fully_sharded
