#include "reducer/operation_kind.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <unordered_map>

namespace lockstep {
namespace {

// Names without "Backward" and the number.
constexpr std::string_view kLinearNames =
    "AdaptiveAvgPool2D AdaptiveAvgPool3D Alias AsStrided AvgPool2D AvgPool3D ChannelShuffle Chunk Clone "
    "Coalesce Col2Im Conj ConjPhysical ConstantPadNd Cumsum Deg2Rad DiagEmbed Diagonal Expand FftC2C FftC2R "
    "FftR2C Flip FusedDropout Gather Im2Col Index IndexFill IndexSelect LazyClone Lift LiftFresh MaskedFill "
    "MaskedSelect Mean NanToNum Nansum NarrowCopy NativeDropout Neg NegView Permute PinMemory PixelShuffle "
    "PixelUnshuffle Rad2Deg ReflectionPad1D ReflectionPad2D ReflectionPad3D Repeat ReplicationPad1D "
    "ReplicationPad2D ReplicationPad3D ReshapeAlias ReshapeCopy Roll Rot90 Select Slice SliceInverse "
    "SparseMask Split SplitWithSizes Squeeze Sum T Take ToCopy ToDense ToMkldnn ToPaddedTensor ToSparse "
    "Trace Transpose Tril Triu Unbind Unfold UnsafeIndex UnsafeSplit UnsafeSplitWithSizes UnsafeView "
    "Unsqueeze UpsampleBicubic2D UpsampleBicubic2DAa UpsampleBilinear2D UpsampleBilinear2DAa "
    "UpsampleLanczos2DAa UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D "
    "UpsampleNearestExact1D UpsampleNearestExact2D UpsampleNearestExact3D UpsampleTrilinear3D Values View "
    "ViewAsComplex ViewAsReal";
constexpr std::string_view kJoinNames =
    "AsStridedScatter BlockDiag Cat Complex DiagonalScatter IndexAdd IndexCopy IndexPut IndexPutImpl Lerp "
    "MaskedScatter Put Scatter ScatterAdd SelectScatter SliceScatter Stack UnsafeIndexPut Where";
constexpr std::string_view kKinkedNames =
    "Abs AdaptiveMaxPool2D AdaptiveMaxPool3D Amax Amin Aminmax Cummax Cummin Dist Fmax Fmin "
    "FractionalMaxPool2D FractionalMaxPool3D Hypot Kthvalue LeakyRelu LinalgVectorNorm Max MaxPool2D "
    "MaxPool2DWithIndices MaxPool3DWithIndices MaxUnpool2D MaxUnpool3D Maximum Median Min Minimum Mode "
    "Nanmedian Norm Relu RreluWithNoise RreluWithNoiseFunctional Sort Std StdMean Topk";
constexpr std::string_view kProductNames = "Bmm Dot Ldexp LinalgCross Matmul Mm Mul Mv PreluKernel Trilinear Vdot";
constexpr std::string_view kAddedProductNames = "Addbmm Addcmul Addmm Addmv Addr Baddbmm SparseAddmm";
constexpr std::string_view kBiasedProductNames = "ConvTbc Convolution Linear MkldnnConvolution MkldnnLinear";

using Kinds = std::unordered_map<std::string_view, OperationKind>;

void add(std::string_view names, OperationKind kind, Kinds& to) {
  while (!names.empty()) {
    const size_t end = std::min(names.find(' '), names.size());
    to.emplace(names.substr(0, end), kind);
    names.remove_prefix(std::min(end + 1, names.size()));
  }
}

const Kinds& kinds() {
  static const auto* const kKinds = [] {
    auto* const all = new Kinds;
    add(kLinearNames, OperationKind::kLinear, *all);
    add(kJoinNames, OperationKind::kJoin, *all);
    add("Add Rsub Sub", OperationKind::kSum, *all);
    add(kKinkedNames, OperationKind::kKinked, *all);
    add(kProductNames, OperationKind::kProduct, *all);
    add("Div", OperationKind::kQuotient, *all);
    add(kAddedProductNames, OperationKind::kAddedProduct, *all);
    add(kBiasedProductNames, OperationKind::kBiasedProduct, *all);
    add("Addcdiv", OperationKind::kAddedQuotient, *all);
    return all;
  }();
  return *kKinds;
}

}  // namespace

OperationKind kind_of(const std::string& name) {
  if (name.find("CopySlices") != std::string::npos || name.find("CopyBackwards") != std::string::npos)
    return OperationKind::kLinear;
  constexpr std::string_view kBackward = "Backward", kOfLists = "Foreach";
  const size_t at = name.find(kBackward);
  // A program's own have C++ names and, in Python, no number.
  if (at == std::string::npos || name.find(':') != std::string::npos) return OperationKind::kUnknown;
  const size_t last = name.rfind(kBackward) + kBackward.size();
  if (last == name.size() || std::isdigit(static_cast<unsigned char>(name[last])) == 0) return OperationKind::kUnknown;
  std::string_view stem = std::string_view(name).substr(0, at);
  if (stem.starts_with(kOfLists)) stem.remove_prefix(kOfLists.size());
  const auto found = kinds().find(stem);
  if (found == kinds().end()) return OperationKind::kNonlinear;
  // Their own backward, if it has a graph, adds nothing.
  const bool is_backward = at + kBackward.size() != last;
  return is_backward && found->second == OperationKind::kBiasedProduct ? OperationKind::kProduct : found->second;
}

}  // namespace lockstep
