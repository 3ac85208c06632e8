#include "data_parallel/same_model.h"

#include <sstream>

#include <ATen/ATen.h>

#include "base/first_difference.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// In which order its elements lie: gradients are added as they do.
std::string order_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense() || tensor.is_contiguous()) return "";
  std::ostringstream text;
  text << ", with strides " << tensor.strides();
  return text.str();
}

std::string describe(const NamedTensors& tensors, const std::function<std::string(const at::Tensor&)>& remark) {
  std::ostringstream text;
  for (const auto& [name, tensor] : tensors) {
    text << name << ": ";
    if (tensor.defined())
      text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << " on "
           << c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true) << order_of(tensor)
           << (tensor.requires_grad() ? "" : ", no gradient") << remark(tensor) << '\n';
    else
      text << "undefined\n";
  }
  return text.str();
}

}  // namespace

void check_same_on_all_ranks(const Group& group, const std::string& kind, const std::string& lines) {
  if (group.world_size() == 1) return;
  // Every rank compares everything, so all find the same difference or none; a model has a few thousand lines at most.
  const std::string difference = first_difference(kind, group.all_gather_bytes(lines));
  if (difference.empty()) return;
  const bool is_option = kind.starts_with("option");
  const std::string text =
      (is_option ? "the ranks gave different options: " : "the ranks do not hold the same model: ") + difference;
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text + (is_option ? ". Give the same ones on every rank."
                                : ". Build and edit the module in the same way on every rank before "
                                  "DistributedDataParallel attaches to it or refresh() is called."));
}

void check_same_on_all_ranks(const Group& group, const std::string& kind, const NamedTensors& tensors,
                             const std::function<std::string(const at::Tensor&)>& remark) {
  check_same_on_all_ranks(group, kind, describe(tensors, remark));
}

}  // namespace lockstep
