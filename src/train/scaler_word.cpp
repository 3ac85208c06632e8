#include "train/scaler_word.h"

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "rank_page/operation_label.h"

namespace lockstep {

ScalerWords tell(const std::optional<Group>& ranks, const ScalerWord& own) {
  ScalerWords all{own, own};
  if (!ranks) return all;
  // One label for all calls: gathers with different labels are not compared further.
  const OperationLabel label("GradScaler::step()");
  std::vector<float> said(own.begin(), own.end());
  for (int about = kScale; about < kSaid; ++about) {
    const float number = own[static_cast<size_t>(about)];
    said.push_back(number == kNotKnown ? kNotKnown : -number);
  }
  const at::Tensor sent = at::tensor(said);
  ranks->all_reduce(sent, ReduceOp::kMax);
  std::copy_n(sent.const_data_ptr<float>(), said.size(), said.begin());
  std::copy_n(said.begin(), own.size(), all.largest.begin());
  std::transform(said.begin() + kSaid, said.end(), all.smallest.begin() + kScale,
                 [](float negative) { return -negative; });
  return all;
}

}  // namespace lockstep
