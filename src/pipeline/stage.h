#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/group.h>
#include <lockstep/pipeline.h>

#include "pipeline/neighbour.h"

namespace lockstep {

/// A rank's part in the passes of a pipeline.
class Stage {
 public:
  using Model = DistributedDataParallel<torch::nn::Sequential>;
  /// `ranks`: of this pipeline, in the order of the stages; `me`: this one in messages. `ranks` and `model` outlive the
  /// object. Every rank makes it.
  Stage(const Group& ranks, Model& model, const PipelineOptions& options, std::string me);

  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Pipeline::Loss& loss);
  at::Tensor forward(const at::Tensor& input);
  /// TORCH_CHECK fails after an error.
  void check_usable() const;

 private:
  /// What a micro-batch leaves for its backward.
  struct Pass {
    at::Tensor input, output;  ///< output: on the last stage, the loss times its share
  };
  struct Batch {
    std::vector<int64_t> rows;  ///< of micro-batches, as what follows
    std::vector<at::Tensor> inputs, targets;
    std::vector<Pass> passes;
    int64_t mark;     ///< of the targets
    at::Tensor loss;  ///< the sum so far, on the last stage
  };

  bool is_first() const { return !before_; }
  bool is_last() const { return !after_; }
  Batch batch_of(const at::Tensor& input, const at::Tensor& target) const;
  void check_input(const at::Tensor& input) const;
  void run_forward(Batch& batch, size_t micro_batch, const Pipeline::Loss& loss);
  void run_backward(Batch& batch, size_t micro_batch);
  Neighbour::Received receive(Neighbour& from, bool more);
  /// The sum of the last stage's losses.
  double shared_loss(const Batch& batch) const;
  void finish();
  /// Runs `pass`, and tells the neighbours what it throws.
  void telling(const std::function<void()>& pass);
  void tell(const std::string& trouble) noexcept;

  const Group& ranks_;
  Model& model_;
  const int micro_batches_;
  int in_flight_;
  const std::string me_;
  const at::Device device_;
  std::optional<Neighbour> before_, after_;
  const Neighbour* told_by_ = nullptr;
  bool failed_ = false;
};

}  // namespace lockstep
