#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/group.h>

#include "models.h"

namespace lockstep::bench {

/// How a system keeps replicas in step. Made when it attaches; all ranks together.
class Synchronizer {
 public:
  virtual ~Synchronizer() = default;
  virtual void before_forward() {}
  virtual void after_forward(const at::Tensor& /*loss*/) {}
  virtual void after_step() {}
  /// `name` is sgd (with momentum) or adamw: LibTorch's, unless the system has its own. Throws std::invalid_argument on
  /// another name.
  virtual std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                                  const std::vector<at::Tensor>& parameters);
  /// The values of all parameters, in their order; all ranks call it, and rank 0's are right.
  virtual std::vector<at::Tensor> values(const std::vector<at::Tensor>& parameters) { return parameters; }
  /// What this rank has sent to other machines so far, of a system that counts it.
  virtual int64_t sent_bytes() const { return 0; }
};

/// `system` is one of step_systems.h that is not PyTorch's; `folder` is seen by all ranks and empty. Throws
/// std::invalid_argument on another name.
std::unique_ptr<Synchronizer> attach(const std::string& system, const std::shared_ptr<Model>& model, const Group& group,
                                     const std::string& folder);

}  // namespace lockstep::bench
