#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// The globals that a pickle may name, by their meaning here.
enum class Global : uint8_t {
  kUnknown,
  kUnsupportedTensor,  ///< a kind of tensor that PyTorch has and Lockstep does not support
  kOrderedDict,
  kSize,
  kDevice,
  kComplex,
  kSet,
  kByteArray,
  kEncode,
  kTensor,
  kParameter,
  kRebuildTensor,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kRebuildFromType,
  kUntypedStorage,
  kTypedStorage,  ///< torch.FloatStorage and so on, with a dtype
  kDtype,         ///< torch.float32 and so on
  kNumpyScalar,
  kNumpyDtype,
};

Global global_of(std::string_view module, std::string_view name);

}  // namespace lockstep
