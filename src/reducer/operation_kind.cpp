#include "reducer/operation_kind.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <unordered_set>

namespace lockstep {
namespace {

// Without "Backward" and a number.
constexpr std::string_view kLinearNames =
    "Abs Addcdiv Addcmul AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D Add Alias Amax "
    "Amin Aminmax AsStrided AsStridedScatter AvgPool2D AvgPool3D BlockDiag Cat ChannelShuffle Chunk Clone "
    "Coalesce Col2Im Complex Conj ConjPhysical ConstantPadNd Cummax Cummin Cumsum Deg2Rad DiagEmbed Diagonal "
    "DiagonalScatter Dist Expand FftC2C FftC2R FftR2C Flip Fmax Fmin FractionalMaxPool2D FractionalMaxPool3D "
    "FusedDropout Gather Hypot Im2Col Index IndexAdd IndexCopy IndexFill IndexPut IndexPutImpl IndexSelect "
    "Kthvalue LazyClone LeakyRelu Lerp Lift LiftFresh LinalgVectorNorm MaskedFill MaskedScatter MaskedSelect Max "
    "MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices MaxUnpool2D MaxUnpool3D Maximum Mean Median Min Minimum "
    "Mode NanToNum Nanmedian Nansum NarrowCopy NativeDropout Neg NegView Norm Permute PinMemory PixelShuffle "
    "PixelUnshuffle Put Rad2Deg ReflectionPad1D ReflectionPad2D ReflectionPad3D Relu Repeat ReplicationPad1D "
    "ReplicationPad2D ReplicationPad3D ReshapeAlias ReshapeCopy Roll Rot90 RreluWithNoise "
    "RreluWithNoiseFunctional Rsub Scatter ScatterAdd Select SelectScatter Slice SliceInverse SliceScatter Sort "
    "SparseMask Split SplitWithSizes Squeeze Stack Std StdMean Sub Sum T Take ToCopy ToDense ToMkldnn "
    "ToPaddedTensor ToSparse Topk Trace Transpose Tril Triu Unbind Unfold UnsafeIndex UnsafeIndexPut UnsafeSplit "
    "UnsafeSplitWithSizes UnsafeView Unsqueeze UpsampleBicubic2D UpsampleBicubic2DAa UpsampleBilinear2D "
    "UpsampleBilinear2DAa UpsampleLanczos2DAa UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D "
    "UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D UpsampleNearestExact3D UpsampleTrilinear3D "
    "Values View ViewAsComplex ViewAsReal Where";
constexpr std::string_view kProductNames =
    "Addbmm Addmm Addmv Addr Baddbmm Bmm ConvTbc Convolution Dot Ldexp Linear LinalgCross Matmul Mm "
    "MkldnnConvolution MkldnnLinear Mul Mv PreluKernel SparseAddmm Trilinear Vdot";

using Names = std::unordered_set<std::string_view>;

Names split(std::string_view names) {
  Names all;
  while (!names.empty()) {
    const size_t end = std::min(names.find(' '), names.size());
    all.insert(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return all;
}

const Names& linear() {
  static const auto* const kNames = new Names(split(kLinearNames));
  return *kNames;
}

const Names& products() {
  static const auto* const kNames = new Names(split(kProductNames));
  return *kNames;
}

}  // namespace

OperationKind kind_of(const std::string& name) {
  if (name.find("CopySlices") != std::string::npos || name.find("CopyBackwards") != std::string::npos)
    return OperationKind::kLinear;
  constexpr std::string_view kBackward = "Backward", kOfLists = "Foreach";
  const size_t at = name.find(kBackward);
  // Those of a program have C++ names, and in Python no number.
  if (at == std::string::npos || name.find(':') != std::string::npos) return OperationKind::kUnknown;
  const size_t last = name.rfind(kBackward) + kBackward.size();
  if (last == name.size() || std::isdigit(static_cast<unsigned char>(name[last])) == 0) return OperationKind::kUnknown;
  std::string_view stem = std::string_view(name).substr(0, at);
  if (stem.starts_with(kOfLists)) stem.remove_prefix(kOfLists.size());
  if (linear().contains(stem)) return OperationKind::kLinear;
  if (products().contains(stem)) return OperationKind::kProduct;
  return stem == "Div" ? OperationKind::kQuotient : OperationKind::kNonlinear;
}

}  // namespace lockstep
