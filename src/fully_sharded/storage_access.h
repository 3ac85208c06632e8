#pragma once

#include <string>
#include <utility>

#include <c10/core/StorageImpl.h>

// The refusal of a storage to be read. LibTorch 2.11 and 2.12 cannot take one back, so there a storage without memory
// is left to LibTorch's own check, which says less.

namespace lockstep::fully_sharded {

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
