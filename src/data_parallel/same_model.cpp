#include "data_parallel/same_model.h"

#include <sstream>
#include <vector>

#include <ATen/ATen.h>

#include "base/rank_names.h"
#include "base/shared_weights.h"
#include "base/text.h"
#include "collectives/storages.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// Describes the memory order of its elements, in which gradients are added.
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

/// Precedes the text of a rank whose weights are wrong, which replaces its lines.
constexpr char kTrouble = '!';

/// Every rank compares everything, so all find the same difference or none. A model has a few thousand lines at most.
void compare_lines(const std::string& kind, const std::vector<std::string>& lines, const char* before) {
  const std::string difference = first_difference(kind, lines);
  if (difference.empty()) return;
  const bool is_option = kind.starts_with("option");
  const std::string text =
      (is_option ? "the ranks gave different options: " : "the ranks do not hold the same model: ") + difference;
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text + (is_option ? ". Give the same options on every rank."
                                : std::string(". Build and edit the module in the same way on every rank before ") +
                                      before + "."));
}

}  // namespace

void check_same_on_all_ranks(const Group& group, const std::string& kind, const std::string& lines,
                             const char* before) {
  if (group.world_size() > 1) compare_lines(kind, group.all_gather_bytes(lines), before);
}

void check_same_on_all_ranks(const Group& group, const std::string& kind, const NamedTensors& tensors,
                             const std::function<std::string(const at::Tensor&)>& remark, const char* before) {
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor] : tensors)
    if (tensor.defined()) all.push_back(tensor);
  const std::string trouble = trouble_of(shared_weights_in(storages_of(all)));
  const auto told = group.all_gather_bytes(trouble.empty() ? describe(tensors, remark) : kTrouble + trouble);
  for (const std::string& one : told)
    if (one.starts_with(kTrouble)) throw Error(ranks_with(told, one) + ": " + one.substr(1));
  compare_lines(kind, told, before);
}
}  // namespace lockstep
