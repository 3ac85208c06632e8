#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep {

/// What a rank did to its stage between two passes. Each rank of a pipeline has other parameters, so nothing but this
/// shows that one has stepped and another has not.
class StepWatch {
 public:
  /// Of one rank, or of several: both answers.
  struct Answer {
    bool yes = false, no = false;
  };
  struct Done {
    Answer stepped;          ///< changed parameters
    Answer cleared;          ///< gradients, all of them
    std::string regraded{};  ///< the first parameter whose gradient has other values that it kept until it was cleared
  };

  explicit StepWatch(const torch::nn::Module& layers);
  /// Parameters and gradients are as the pipeline leaves them. Holds the gradients, since zero_grad() lets go of them.
  void mark();
  /// Lets go of them: a backward begins.
  void release();
  /// Since mark(); nothing before the first.
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
