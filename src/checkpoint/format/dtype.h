#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

/// An element type, as named in files. Each type is a single object; compare addresses.
struct Dtype {
  const char* name;         ///< PyTorch's, without "torch.": "float32"
  const char* storage;      ///< class of the storage in a .pt file; null if PyTorch writes an UntypedStorage
  const char* safetensors;  ///< "F32"; null if that format has none
  uint64_t bytes;           ///< of one element
};

/// Null if there is no such name.
const Dtype* dtype_of_name(std::string_view name);
const Dtype* dtype_of_storage(std::string_view storage);
const Dtype* dtype_of_safetensors(std::string_view name);

/// Whether PyTorch has a dtype of that name that these files cannot hold: quantized and sub-byte types.
bool is_unsupported_dtype(std::string_view name);

}  // namespace lockstep
