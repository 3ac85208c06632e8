#include "checkpoint/format/pickle_globals.h"

#include "checkpoint/format/dtype.h"

namespace lockstep {
namespace {

struct Known {
  const char* module;
  const char* name;
  Global global;
};

constexpr Known kKnown[] = {
    {"collections", "OrderedDict", Global::kOrderedDict},
    {"torch", "Size", Global::kSize},
    {"torch", "device", Global::kDevice},
    {"torch", "Tensor", Global::kTensor},
    {"torch.nn.parameter", "Parameter", Global::kParameter},
    {"torch.storage", "UntypedStorage", Global::kUntypedStorage},
    {"torch", "UntypedStorage", Global::kUntypedStorage},
    {"torch._utils", "_rebuild_tensor", Global::kRebuildTensor},
    {"torch._utils", "_rebuild_tensor_v2", Global::kRebuildTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", Global::kRebuildTensorV3},
    {"torch._utils", "_rebuild_parameter", Global::kRebuildParameter},
    {"torch._tensor", "_rebuild_from_type_v2", Global::kRebuildFromType},
    {"_codecs", "encode", Global::kEncode},
    {"builtins", "complex", Global::kComplex},
    {"__builtin__", "complex", Global::kComplex},
    {"builtins", "set", Global::kSet},
    {"__builtin__", "set", Global::kSet},
    {"builtins", "bytearray", Global::kByteArray},
    {"__builtin__", "bytearray", Global::kByteArray},
    {"numpy.core.multiarray", "scalar", Global::kNumpyScalar},
    {"numpy._core.multiarray", "scalar", Global::kNumpyScalar},
    {"numpy", "dtype", Global::kNumpyDtype},
    {"torch._utils", "_rebuild_qtensor", Global::kUnsupportedTensor},
    {"torch._utils", "_rebuild_sparse_tensor", Global::kUnsupportedTensor},
    {"torch._utils", "_rebuild_nested_tensor", Global::kUnsupportedTensor},
    {"torch._utils", "_rebuild_wrapper_subclass", Global::kUnsupportedTensor},
    {"torch._utils", "_rebuild_meta_tensor_no_storage", Global::kUnsupportedTensor},
    {"torch._utils", "_rebuild_parameter_with_state", Global::kUnsupportedTensor},
};

}  // namespace

Global global_of(std::string_view module, std::string_view name) {
  for (const Known& known : kKnown)
    if (module == known.module && name == known.name) return known.global;
  if (module != "torch") return Global::kUnknown;
  if (dtype_of_storage(name) != nullptr) return Global::kTypedStorage;
  if (dtype_of_name(name) != nullptr) return Global::kDtype;
  if (is_unsupported_dtype(name)) return Global::kUnsupportedTensor;
  return Global::kUnknown;
}

}  // namespace lockstep
