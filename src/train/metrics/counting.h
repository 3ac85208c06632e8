#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::counting {

/// Samples that are correct in the sense of Accuracy, and samples that count at all.
///
/// `scores` [n, classes], floating point; `target` int64 [n]; both contiguous, on one device.
struct Correct {
  int64_t correct = 0;
  int64_t counted = 0;
};
/// On the CPU, in one pass. Throws c10::Error for a target that is neither a class nor `ignore_index`.
Correct correct_here(const at::Tensor& scores, const at::Tensor& target, int64_t top_k, int64_t ignore_index);
/// On any device, by operators that do not wait: double [2].
at::Tensor correct_there(const at::Tensor& scores, const at::Tensor& target, int64_t top_k, int64_t ignore_index);

/// Adds 1 to counts[target * classes + predicted] for every sample. `predicted` int64 [n]. On the CPU.
void confusion_here(const at::Tensor& predicted, const at::Tensor& target, int64_t classes, int64_t ignore_index,
                    double* counts);
/// confusion_here() on any device: double [classes * classes].
at::Tensor confusion_there(const at::Tensor& predicted, const at::Tensor& target, int64_t classes,
                           int64_t ignore_index);

/// int64 [n]: argmax over the last dimension of `scores` [n, classes], without the operator's overhead on the CPU.
at::Tensor best_here(const at::Tensor& scores);

}  // namespace lockstep::counting
