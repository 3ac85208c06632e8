#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace lockstep::detail {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// The state of modules that must not change between a checkpointed call and its backward.
class ModuleMarks {
 public:
  explicit ModuleMarks(const Modules& modules);
  /// Throws c10::Error if the state of these modules has changed.
  void check_unchanged(const Modules& modules) const;

 private:
  std::vector<std::pair<const torch::nn::Module*, bool>> layers_;  ///< with whether it is in training mode
  std::vector<std::pair<const c10::TensorImpl*, uint64_t>> parameters_;
};

/// The modules' buffers before the first call.
class FirstBuffers {
 public:
  explicit FirstBuffers(const Modules& modules);
  /// Called when the first call has ended. Keeps only the buffers that it has changed.
  void drop_unchanged();
  /// Throws c10::Error if others have changed since.
  void check_unchanged() const;

  /// While it lives, the buffers have their values from before the first call.
  class Guard {
   public:
    explicit Guard(const FirstBuffers& buffers);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::vector<std::pair<at::Tensor, at::Tensor>> before_;
  };

 private:
  struct Buffer {
    std::string name;
    at::Tensor now, first;  ///< first: undefined if the first call has not changed it
    uint64_t mark;          ///< after the first call
  };
  std::vector<Buffer> all_;
};

/// Some elements of a call's results, on a CPU, where reading them does not wait.
class SomeValues {
 public:
  explicit SomeValues(const std::vector<at::Tensor>& outputs);
  /// The index of the first tensor whose values differ in the second call by more than another kernel's rounding
  /// explains; -1 if none.
  int64_t first_other(const SomeValues& second) const;

 private:
  std::vector<at::Tensor> values_;
};

}  // namespace lockstep::detail
