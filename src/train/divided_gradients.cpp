#include "train/divided_gradients.h"

#include <utility>

#include "reducer/gradient_marks.h"

namespace lockstep {
namespace {

std::vector<uint64_t> marks_of_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<uint64_t> marks;
  for (const at::Tensor& parameter : parameters)
    marks.push_back(parameter.grad().defined() ? Hash::mixed(mark_of(parameter.grad()), 1) : 0);
  return marks;
}

}  // namespace

void DividedGradients::add(uint64_t of, std::vector<at::Tensor> parameters) {
  const MutexLock lock(mutex_);
  divided_[of] = {.parameters = std::move(parameters), .marks = {}};
}

bool DividedGradients::remove(uint64_t of) {
  const MutexLock lock(mutex_);
  const auto found = divided_.find(of);
  if (found == divided_.end()) return false;
  const bool is_mixed = found->second.is_mixed;
  divided_.erase(found);
  return is_mixed;
}

void DividedGradients::clear() {
  const MutexLock lock(mutex_);
  divided_.clear();
}

bool DividedGradients::any() const {
  const MutexLock lock(mutex_);
  return !divided_.empty();
}

void DividedGradients::backward_begins() {
  const MutexLock lock(mutex_);
  for (auto& [of, divided] : divided_) divided.marks = marks_of_gradients(divided.parameters);
}

void DividedGradients::backward_ends() {
  const MutexLock lock(mutex_);
  for (auto& [of, divided] : divided_) {
    const std::vector<uint64_t> before = std::exchange(divided.marks, {});
    if (!before.empty() && before != marks_of_gradients(divided.parameters)) divided.is_mixed = true;
  }
}

}  // namespace lockstep
