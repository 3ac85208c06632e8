#include "reducer/non_finite.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/rank_names.h"

namespace lockstep {

void NonFiniteWatch::look(size_t parameter, const at::Tensor& gradient) {
  if (first_ >= 0 || !gradient.defined() || gradient.layout() != at::kStrided) return;
  at::NoGradGuard no_grad;
  // Usually one pass. Large finite numbers can have an infinite sum, so a second pass may be needed.
  if (at::isfinite(gradient.sum()).item<bool>() || at::isfinite(gradient).all().item<bool>()) return;
  first_ = static_cast<int64_t>(parameter);
}

std::string NonFiniteWatch::findings(const Group& group, const std::vector<std::string>& names) const {
  const at::Tensor all = group.all_gather(at::scalar_tensor(first_, at::kLong));
  const int64_t* by_rank = all.const_data_ptr<int64_t>();
  const std::vector<int64_t> found(by_rank, by_rank + all.numel());
  std::string text;
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank] < 0 || std::find(found.begin(), found.begin() + static_cast<int64_t>(rank), found[rank]) !=
                               found.begin() + static_cast<int64_t>(rank))
      continue;
    text += (text.empty() ? "" : "; ") + ranks_with(found, found[rank]) + ": the gradient of " +
            names[static_cast<size_t>(found[rank])] + " is not finite";
  }
  return text;
}

}  // namespace lockstep
