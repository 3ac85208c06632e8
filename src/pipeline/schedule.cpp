#include "pipeline/schedule.h"

#include <algorithm>

namespace lockstep {

std::vector<PipelineAction> one_forward_one_backward(int stage, int stages, int micro_batches, int in_flight) {
  using Kind = PipelineAction::Kind;
  const int ahead = std::min(in_flight * (stages - 1 - stage), micro_batches);
  std::vector<PipelineAction> actions;
  for (int i = 0; i < ahead; ++i) actions.push_back({Kind::kForward, i});
  for (int i = ahead; i < micro_batches; ++i) {
    actions.push_back({Kind::kForward, i});
    actions.push_back({Kind::kBackward, i - ahead});
  }
  for (int i = micro_batches - ahead; i < micro_batches; ++i) actions.push_back({Kind::kBackward, i});
  return actions;
}

std::vector<int64_t> rows_of_micro_batches(int64_t rows, int micro_batches) {
  std::vector<int64_t> all;
  for (int i = 0; i < micro_batches; ++i) all.push_back(rows / micro_batches + (i < rows % micro_batches ? 1 : 0));
  return all;
}

}  // namespace lockstep
