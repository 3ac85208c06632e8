#pragma once

#include <lockstep/cxx20.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/context.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/group.h>
#include <lockstep/shard.h>
#include <lockstep/state_dict.h>
#include <lockstep/state_in_slices.h>

namespace lockstep {

struct PipelineOptions {
  int stages = 0;         ///< must divide the number of ranks; 0: one for each rank
  int micro_batches = 0;  ///< of each batch; 0: twice the stages
  /// The first layer of each stage but the first; empty: equal numbers of layers.
  std::vector<size_t> cuts = {};
  /// Micro-batches between their forward and their backward, for each later stage: 1 takes the least memory, 2 hides
  /// the time that tensors are on their way. 0: 2 if the stages are on several machines, else 1.
  int in_flight = 0;
};

/// Trains a sequence of layers that is cut into stages, each on other ranks. A batch is cut into micro-batches, which
/// go through the stages one after the other, so that all stages compute at the same time. For models whose layers are
/// few and large, and for slow links: only what a layer returns is sent, and its gradient.
///
///     torch::nn::Sequential layers;                                   // on every rank
///     ...
///     lockstep::Pipeline pipeline(layers, context, {.stages = 2, .micro_batches = 8});
///     layers = nullptr;                                               // frees the layers of the other stages
///     lockstep::ZeroRedundancyOptimizer optimizer(pipeline.replica(), torch::optim::AdamWOptions(1e-3));
///     lockstep::DataLoader train(dataset, pipeline.shard(), {.batch_size = 64, .shuffle = true});
///     for (int epoch : train.epochs(10))
///       for (auto& [data, target] : train) {
///         optimizer.zero_grad();
///         const double loss = pipeline.forward_backward(data, target, torch::nn::CrossEntropyLoss());
///         pipeline.clip_grad_norm(1);
///         optimizer.step();
///       }
///
/// With W ranks and S stages there are W / S pipelines. Ranks 0 to W / S - 1 hold the first stage, the next ones the
/// second: so neighbours, which usually share a machine, hold the same layers, and average their gradients by a
/// DistributedDataParallel, and what goes between machines is what layers return. The loss and the gradients are those
/// of one process that takes the mean over all samples, to rounding.
///
/// Micro-batches follow the schedule "one forward, one backward" (Narayanan et al., "PipeDream", 2019; "Megatron-LM",
/// 2021): stage s holds the activations of at most 1 + (S - 1 - s) * in_flight micro-batches. Of the time of a step,
/// S - 1 of M + S - 1 parts are waiting, for M micro-batches.
///
/// Layers take a tensor, of at most 8 dimensions, whose first are the samples, and return one. Weights may not be
/// shared between stages. Every rank calls each method, except where it says otherwise, on the thread that made the
/// object. An Error within a step reaches all ranks of the pipeline, which then can only be destroyed.
class Pipeline : public detail::StateInSlices {
 public:
  /// A function that makes a layer.
  using MakeLayer = std::function<torch::nn::AnyModule()>;
  /// The mean of a micro-batch's losses, a tensor with one element, from what the last layer has returned and the
  /// targets.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  /// Parameters and buffers get rank 0's values. The layers of other stages lose theirs, whoever holds them. Throws
  /// Error on all ranks if ranks have different layers or options, for fewer layers than stages, and for a tensor that
  /// belongs to two stages.
  Pipeline(torch::nn::Sequential layers, const Context& context, PipelineOptions options = {});
  Pipeline(torch::nn::Sequential layers, const Group& group, PipelineOptions options = {});
  /// Makes one layer after the other, with the numbers that rank 0 draws, and keeps those of this rank's stage, so no
  /// rank ever has memory for more than its stage and one layer.
  Pipeline(const std::vector<MakeLayer>& layers, const Context& context, PipelineOptions options = {});
  Pipeline(const std::vector<MakeLayer>& layers, const Group& group, PipelineOptions options = {});
  ~Pipeline() override;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Forward and backward of a batch. Afterwards each parameter's .grad is the mean over the batches of all pipelines,
  /// added to what it was. Returns the mean of this pipeline's losses, on all of its ranks. `input` may be undefined
  /// except on the first stage. Each rank of a pipeline gives the same batch, of at least as many samples as
  /// micro-batches: an Error if `target`, or an `input` that is given, is not the first stage's.
  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss);
  /// What the last layer returns for `input`, on all ranks of this pipeline, without gradients. `input` may be
  /// undefined except on the first stage.
  at::Tensor forward(const at::Tensor& input);

  /// Scales all gradients so that their norm, over all stages as one vector, is at most `max_norm`; returns the norm
  /// before. Call it after forward_backward(), before step().
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// Number of this rank's stage, and of all. No message.
  int stage() const;
  int stages() const;
  /// This rank's layers, under their names in the sequence. No message.
  torch::nn::Sequential layers() const;
  /// The same layers, whose gradients are averaged over the pipelines: for an optimizer. No message.
  DistributedDataParallel<torch::nn::Sequential>& replica();
  /// The part of the data that this pipeline reads. No message.
  Shard shard() const;

  /// All layers' parameters and buffers under their names in the sequence: on rank 0 all, on the other ranks none.
  [[nodiscard]] StateDict state_dict();
  /// Takes over such a state, given to every rank. Throws Error, before anything is changed, unless names, shapes and
  /// dtypes are the sequence's.
  void load_state_dict(const StateDict& state) override;
  /// For a Checkpointer: checkpointer.add("model", pipeline). Throws Error if the replicas of a stage differ.
  [[nodiscard]] StateDict state_in_slices() override;
  std::vector<detail::ElementRange> elements_to_load(const StateDict& state) const override;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
