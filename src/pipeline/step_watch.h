#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep {

/// Records what a rank did to its stage between two passes. Each rank of a pipeline has other parameters, so nothing
/// else shows that one has stepped and another has not.
class StepWatch {
 public:
  /// The answer of one rank; both flags if of several.
  struct Answer {
    bool yes = false, no = false;
  };
  struct Done {
    Answer stepped;          ///< changed parameters
    Answer cleared;          ///< gradients, all of them
    std::string regraded{};  ///< the first parameter whose gradient was given other values and not cleared since
  };

  explicit StepWatch(const torch::nn::Module& layers);
  /// Marks parameters and gradients as the pipeline leaves them. Holds the gradients, because zero_grad() releases
  /// them.
  void mark();
  /// Releases them: a backward begins.
  void release();
  /// The changes since mark(); none before the first.
  Done since_mark() const;

 private:
  struct Marked {
    std::string name;
    at::Tensor parameter;
    uint64_t value = 0;  ///< a mark of the parameter
    at::Tensor gradient{};
    uint64_t gradient_value = 0;
    int64_t version = 0;  ///< of the gradient
  };
  std::vector<Marked> marked_;
  bool is_marked_ = false;
};

}  // namespace lockstep
