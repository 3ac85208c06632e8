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
#include "pipeline/step_watch.h"

namespace lockstep {

/// A rank's part in the passes of a pipeline.
class Stage {
 public:
  using Model = DistributedDataParallel<torch::nn::Sequential>;
  /// `ranks` are the pipeline's, in the order of the stages; `me` names this rank in messages.
  /// REQUIRES: every rank makes it; `ranks` and `model` outlive it.
  Stage(const Group& ranks, Model& model, const PipelineOptions& options, std::string me);

  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Pipeline::Loss& loss);
  at::Tensor forward(const at::Tensor& input);
  /// TORCH_CHECK fails after an error.
  void check_usable() const;
  /// Marks parameters and gradients after the pipeline has changed them.
  void mark() { steps_.mark(); }
  /// This rank's steps and clearings since the last pass, as flags. TORCH_CHECK fails if they are wrong for every
  /// stage.
  int64_t answers() const;
  /// answers() in words: "stepped, and cleared gradients".
  std::string done() const;

 private:
  /// The tensors that a micro-batch leaves for its backward.
  struct Pass {
    at::Tensor input, output;  ///< output: on the last stage, the loss times its share
  };
  struct Batch {
    std::vector<int64_t> rows;  ///< of micro-batches, as in the following members
    std::vector<at::Tensor> inputs, targets;
    std::vector<Pass> passes;
    Neighbour::Words words;  ///< for the next stage
    at::Tensor loss;         ///< the sum so far, on the last stage
  };

  bool is_first() const { return !before_; }
  bool is_last() const { return !after_; }
  /// Combines both; TORCH_CHECK fails if this rank did something different from one of the earlier stages.
  static int64_t with_answers_of(int64_t earlier, int64_t own);
  Batch batch_of(const at::Tensor& input, const at::Tensor& target) const;
  void check_input(const at::Tensor& input) const;
  /// TORCH_CHECK fails if this rank was given another input than the first stage.
  void check_given(const at::Tensor& input, int64_t first_stages) const;
  void run_forward(Batch& batch, size_t micro_batch, const at::Tensor& input, const Pipeline::Loss& loss);
  void run_backward(Batch& batch, size_t micro_batch);
  /// Returns when the earlier stages have also ended their backward.
  void finish_backward();
  Neighbour::Received receive(Neighbour& from, bool more);
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
  StepWatch steps_;
  std::optional<Neighbour> before_, after_;
  const Neighbour* told_by_ = nullptr;
  bool failed_ = false;
};

}  // namespace lockstep
