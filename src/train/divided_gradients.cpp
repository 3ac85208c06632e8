#include "train/divided_gradients.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "train/optimizer_tensors.h"

namespace lockstep {
namespace {

/// Whether adding to this gradient is the same as replacing it.
bool is_zero(const at::Tensor& gradient) { return !gradient.defined() || !gradient.any().item<bool>(); }

}  // namespace
void DividedGradients::add(uint64_t of, std::vector<at::Tensor> parameters) {
  const MutexLock lock(mutex_);
  divided_[of] = {.parameters = std::move(parameters), .marks = {}};
}

bool DividedGradients::use(uint64_t of) {
  const MutexLock lock(mutex_);
  const auto found = divided_.find(of);
  if (found == divided_.end()) return false;
  for (const uint64_t mark : marks_of_gradients(found->second.parameters)) found->second.used.push_back({mark});
  return found->second.is_mixed;
}

bool DividedGradients::added_to_used(const TensorSet& parameters) const {
  const MutexLock lock(mutex_);
  const auto is_sum = [](const Used& used, uint64_t mark) { return used.is_added_to && used.mark == mark; };
  return std::any_of(divided_.begin(), divided_.end(), [&](const auto& entry) {
    const Divided& divided = entry.second;
    if (divided.used.empty() || !any_of_set(divided.parameters, parameters)) return false;
    const std::vector<uint64_t> now = marks_of_gradients(divided.parameters);
    return !std::equal(divided.used.begin(), divided.used.end(), now.begin(), std::not_fn(is_sum));
  });
}

void DividedGradients::clear() {
  const MutexLock lock(mutex_);
  std::erase_if(divided_, [](const auto& entry) { return entry.second.used.empty(); });
}

bool DividedGradients::any() const {
  const MutexLock lock(mutex_);
  return !divided_.empty();
}

void DividedGradients::backward_begins() {
  const MutexLock lock(mutex_);
  for (auto& [of, divided] : divided_) {
    divided.marks = marks_of_gradients(divided.parameters);
    for (size_t i = 0; i < divided.used.size(); ++i)
      if (divided.used[i].mark != divided.marks[i] || is_zero(divided.parameters[i].grad())) divided.used[i] = {0};
  }
  std::erase_if(divided_, [](const auto& entry) {
    const std::vector<Used>& used = entry.second.used;
    return !used.empty() && std::all_of(used.begin(), used.end(), [](const Used& one) { return one.mark == 0; });
  });
}

void DividedGradients::backward_ends() {
  const MutexLock lock(mutex_);
  for (auto& [of, divided] : divided_) {
    const std::vector<uint64_t> before = std::exchange(divided.marks, {});
    if (before.empty()) continue;
    const std::vector<uint64_t> now = marks_of_gradients(divided.parameters);
    divided.is_mixed = divided.is_mixed || (divided.used.empty() && before != now);
    for (size_t i = 0; i < divided.used.size(); ++i)
      if (divided.used[i].mark != 0 && now[i] != before[i]) divided.used[i] = {.mark = now[i], .is_added_to = true};
  }
}

}  // namespace lockstep
