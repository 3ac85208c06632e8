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
  /// The index of the first layer of each stage but the first. Empty: equal numbers of layers.
  std::vector<size_t> cuts = {};
  /// Micro-batches between their forward and their backward, for each later stage: 1 takes the least memory, 2 hides
  /// the time that tensors are in transit. 0: 2 if the stages are on several machines, else 1.
  int in_flight = 0;
};

/// Trains a sequence of layers that is cut into stages, each on other ranks. A batch is cut into micro-batches, which
/// pass through the stages one after the other, so that all stages compute at the same time. Suits models with few and
/// large layers, and slow links: stages send only a layer's output and its gradient.
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
/// With W ranks and S stages there are W / S pipelines. Ranks 0 to W / S - 1 hold the first stage, the next W / S the
/// second, and so on. Neighbours, which usually share a machine, thus hold the same layers and average their gradients
/// by a DistributedDataParallel, and only layer outputs and their gradients go between machines. The loss and the
/// gradients equal, to rounding, those of one process that takes the mean over all samples.
///
/// Micro-batches follow the schedule "one forward, one backward" (Narayanan et al., "PipeDream", 2019; "Megatron-LM",
/// 2021): stage s holds the activations of at most 1 + (S - 1 - s) * in_flight micro-batches. With M micro-batches, a
/// step waits for S - 1 of M + S - 1 parts of its time.
///
/// Layers take one tensor, of at most 8 dimensions with samples first, and return one. Stages may not share weights.
/// Every rank must call each method, unless its comment says otherwise, on the thread that made the object. An Error
/// within a step reaches all ranks of the pipeline, which can then only be destroyed.
class Pipeline : public detail::StateInSlices {
 public:
  using MakeLayer = std::function<torch::nn::AnyModule()>;
  /// Computes the mean of a micro-batch's losses, a tensor with one element, from the output of the last layer and the
  /// targets.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  /// Parameters and buffers get rank 0's values. The layers of other stages lose theirs, whoever holds them. Throws
  /// Error on all ranks if ranks have different layers or options, if there are fewer layers than stages, and if a
  /// tensor belongs to two stages.
  Pipeline(torch::nn::Sequential layers, const Context& context, PipelineOptions options = {});
  Pipeline(torch::nn::Sequential layers, const Group& group, PipelineOptions options = {});
  /// Makes one layer after the other, with the random numbers that rank 0 draws, and keeps those of this rank's stage.
  /// So no rank ever has memory for more than its stage and one layer.
  Pipeline(const std::vector<MakeLayer>& layers, const Context& context, PipelineOptions options = {});
  Pipeline(const std::vector<MakeLayer>& layers, const Group& group, PipelineOptions options = {});
  ~Pipeline() override;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Runs forward and backward of a batch. Adds to each parameter's .grad the mean over the batches of all pipelines.
  /// Returns the mean of this pipeline's losses, on all of its ranks. `input` may be undefined except on the first
  /// stage. Each rank of a pipeline gives the same batch, of at least as many samples as micro-batches; it is an Error
  /// if `target`, or an `input` that is given, is not the first stage's.
  double forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss);
  /// Returns the last layer's output for `input`, on all ranks of this pipeline, without gradients. `input` may be
  /// undefined except on the first stage.
  at::Tensor forward(const at::Tensor& input);

  /// Scales all gradients so that their norm, over all stages as one vector, is at most `max_norm`; returns the norm
  /// before scaling. Call it after forward_backward(), before step().
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// The number of this rank's stage, and the number of stages. Does not communicate.
  int stage() const;
  int stages() const;
  /// This rank's layers, under their names in the sequence. Does not communicate.
  torch::nn::Sequential layers() const;
  /// layers(), with gradients averaged over the pipelines: for an optimizer. Does not communicate.
  DistributedDataParallel<torch::nn::Sequential>& replica();
  /// The part of the data that this pipeline reads. Does not communicate.
  Shard shard() const;

  /// All layers' parameters and buffers under their names in the sequence: all of them on rank 0, none on other ranks.
  [[nodiscard]] StateDict state_dict();
  /// Loads such a state, given to every rank. Throws Error, before anything is changed, unless names, shapes and dtypes
  /// are the sequence's.
  void load_state_dict(const StateDict& state) override;
  /// The ranks that the Checkpointer must be made over.
  const Group* slice_holders() const override;
  /// For a Checkpointer: checkpointer.add("model", pipeline). Throws Error if the replicas of a stage differ.
  [[nodiscard]] StateDict state_in_slices() override;
  std::vector<detail::ElementRange> elements_to_load(const StateDict& state) const override;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
