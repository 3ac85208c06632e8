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

/// What must not change between a checkpointed call and its backward, of all modules.
class ModuleMarks {
 public:
  explicit ModuleMarks(const Modules& modules);
  /// Throws c10::Error if something has, of these modules.
  void check_unchanged(const Modules& modules) const;

 private:
  std::vector<std::pair<const torch::nn::Module*, bool>> layers_;  ///< and whether it is in training mode
  std::vector<std::pair<const c10::TensorImpl*, uint64_t>> parameters_;
};

/// The modules' buffers as the first call has found them.
class FirstBuffers {
 public:
  explicit FirstBuffers(const Modules& modules);
  /// The first call has ended: only buffers that it has changed are kept.
  void drop_unchanged();
  /// Throws c10::Error if others have changed since.
  void check_unchanged() const;

  /// While it lives, the buffers are as the first call has found them.
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
    uint64_t mark;          ///< of it after the first call
  };
  std::vector<Buffer> all_;
};

/// Some elements of what a call has returned, on a CPU, where reading them does not wait.
class SomeValues {
 public:
  explicit SomeValues(const std::vector<at::Tensor>& outputs);
  /// The number of the first tensor whose values are others in the second call, beyond what another kernel's rounding
  /// explains; -1 if there is none.
  int64_t first_other(const SomeValues& second) const;

 private:
  std::vector<at::Tensor> values_;
};

}  // namespace lockstep::detail
