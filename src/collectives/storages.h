#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

inline std::vector<const void*> storages_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> storages;
  for (const at::Tensor& tensor : tensors)
    if (tensor.has_storage()) storages.push_back(tensor.storage().unsafeGetStorageImpl());
  return storages;
}

}  // namespace lockstep
