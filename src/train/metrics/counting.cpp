#include "train/metrics/counting.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

namespace lockstep::counting {
namespace {

void check_class(int64_t target, int64_t classes) {
  TORCH_CHECK_INDEX(target >= 0 && target < classes, "target ", target, " is not one of ", classes,
                    " classes; targets count from 0");
}

/// Classes that beat class `own` of a row. A comparison that is false for NaN, negated, so that NaN beats.
template <typename T>
int64_t better_than(const T* row, int64_t classes, int64_t own) {
  const T score = row[own];
  int64_t better = 0;
  for (int64_t i = 0; i < own; ++i) better += !(row[i] < score);
  for (int64_t i = own; i < classes; ++i) better += !(row[i] <= score);
  return better;
}

template <typename T>
int64_t best_of(const T* row, int64_t classes) {
  int64_t best = 0;
  for (int64_t i = 1; i < classes; ++i)
    if (!(row[i] <= row[best]) && row[best] == row[best]) best = i;
  return best;
}

}  // namespace

Correct correct_here(const at::Tensor& scores, const at::Tensor& target, int64_t top_k, int64_t ignore_index) {
  const int64_t samples = scores.size(0), classes = scores.size(1);
  const int64_t* targets = target.const_data_ptr<int64_t>();
  Correct result;
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "Accuracy::update", [&] {
    const scalar_t* row = scores.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < samples; ++i, row += classes) {
      if (targets[i] == ignore_index) continue;
      check_class(targets[i], classes);
      ++result.counted;
      result.correct += better_than(row, classes, targets[i]) < top_k;
    }
  });
  return result;
}

at::Tensor correct_there(const at::Tensor& scores, const at::Tensor& target, int64_t top_k, int64_t ignore_index) {
  const at::Tensor counted = target.ne(ignore_index);
  const at::Tensor own = target.masked_fill(counted.logical_not(), 0).unsqueeze(1);
  const at::Tensor score = scores.gather(1, own);
  const at::Tensor lower = at::arange(scores.size(1), target.options()).unsqueeze(0).lt(own);
  const at::Tensor worse = at::where(lower, scores.lt(score), scores.le(score));
  const at::Tensor correct = worse.logical_not().sum(1).lt(top_k).logical_and(counted);
  return at::stack({correct.sum(), counted.sum()}).to(at::kDouble);
}

void confusion_here(const at::Tensor& predicted, const at::Tensor& target, int64_t classes, int64_t ignore_index,
                    double* counts) {
  const int64_t* columns = predicted.const_data_ptr<int64_t>();
  const int64_t* rows = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i) {
    if (rows[i] == ignore_index) continue;
    check_class(rows[i], classes);
    TORCH_CHECK_INDEX(columns[i] >= 0 && columns[i] < classes, "prediction ", columns[i], " is not one of ", classes,
                      " classes");
    counts[rows[i] * classes + columns[i]] += 1;
  }
}

at::Tensor confusion_there(const at::Tensor& predicted, const at::Tensor& target, int64_t classes,
                           int64_t ignore_index) {
  const at::Tensor counted = target.ne(ignore_index);
  const at::Tensor place = at::where(counted, target * classes + predicted, at::zeros_like(target));
  return at::zeros({classes * classes}, target.options().dtype(at::kDouble))
      .scatter_add_(0, place, counted.to(at::kDouble));
}

at::Tensor best_here(const at::Tensor& scores) {
  const int64_t samples = scores.size(0), classes = scores.size(1);
  at::Tensor best = at::empty({samples}, at::kLong);
  int64_t* to = best.mutable_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "ConfusionMatrix::update", [&] {
    const scalar_t* row = scores.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < samples; ++i, row += classes) to[i] = best_of(row, classes);
  });
  return best;
}

}  // namespace lockstep::counting
