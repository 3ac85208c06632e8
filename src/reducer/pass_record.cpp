#include "reducer/pass_record.h"

#include <algorithm>
#include <utility>

#include "reducer/scaled_passes.h"

namespace lockstep {
namespace {

/// Passes without a zero_grad() between them are a mistake long before.
constexpr size_t kMostPasses = 1024;

/// On a device, where reading waits for what is queued, any gradient counts as cleared.
bool is_cleared(const at::Tensor& gradient) {
  static const uint64_t kOfZeros = sample_of(at::zeros({1}));
  return !gradient.defined() || !gradient.is_cpu() || gradient._is_zerotensor() ||
         (gradient.layout() == at::kStrided && sample_of(gradient) == kOfZeros);
}

}  // namespace

void PassRecord::begin(const std::vector<at::Tensor>& parameters) {
  current_.assign(ScaledPasses::any() ? parameters.size() : 0, false);
  if (current_.empty()) forget();
}

void PassRecord::forget_cleared(const std::vector<at::Tensor>& parameters) {
  if (passes_.empty()) return;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (is_cleared(parameters[i].grad()))
      for (Pass& pass : passes_) pass.reached[i] = false;
  std::erase_if(passes_, [](const Pass& pass) {
    return std::find(pass.reached.begin(), pass.reached.end(), true) == pass.reached.end();
  });
}

void PassRecord::end(int number) {
  if (current_.empty()) return;
  if (passes_.size() == kMostPasses) passes_.erase(passes_.begin());
  passes_.push_back({number, std::exchange(current_, {})});
}

std::vector<int> PassRecord::numbers(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const {
  std::vector<int> numbers;
  for (const Pass& pass : passes_)
    for (size_t i = 0; i < parameters.size(); ++i)
      if (pass.reached[i] && chosen.contains(parameters[i].unsafeGetTensorImpl())) {
        numbers.push_back(pass.number);
        break;
      }
  return numbers;
}

}  // namespace lockstep
