#pragma once

#include <ATen/ATen.h>

#include <lockstep/dataset.h>

namespace lockstep::testing {

/// Sample i is the number i, as data and as target.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor numbers = at::tensor(indices, at::kLong);
    return {.data = numbers, .target = numbers.clone()};
  }

 private:
  int64_t size_;
};

}  // namespace lockstep::testing
