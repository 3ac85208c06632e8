#pragma once

#include <torch/torch.h>

#include <lockstep/dataset.h>

namespace lockstep::testing {

/// `samples` points in four dimensions, and the values of a fixed function at them.
class Waves : public Dataset {
 public:
  explicit Waves(int64_t samples)
      : data_(at::sin(at::arange(samples * 4, at::kFloat) * 12.9898f).view({samples, 4})),
        target_(data_.sum(1, true).mul(3).cos()) {}
  int64_t size() const override { return data_.size(0); }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor chosen = at::tensor(indices, at::kLong);
    return {data_.index_select(0, chosen), target_.index_select(0, chosen)};
  }

 private:
  const at::Tensor data_, target_;
};

}  // namespace lockstep::testing
