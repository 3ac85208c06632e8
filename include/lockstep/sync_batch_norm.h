#pragma once

#include <cstdint>

#include <torch/csrc/api/include/torch/nn/modules/batchnorm.h>

#include <lockstep/group.h>

namespace torch::jit {
struct Module;
}

namespace lockstep {

/// Makes every BatchNorm1d, 2d and 3d in `module` take its statistics in training over the batches of all ranks of
/// `group`, as if their samples were one batch; returns how many there are.
///
///     Net net;                                              // its forward calls bn->forward(x), as ever
///     lockstep::convert_sync_batchnorm(*net, context.group());
///     lockstep::DistributedDataParallel model(net, context);
///
/// Nothing in the module is replaced: layers, parameters, buffers and names stay, and whoever holds a layer (a
/// ModuleHolder, a Sequential) holds a synchronised one. What changes is torch's operator: from
/// the first conversion on this process's batch norm looks up the running mean or weight it is given, and takes the
/// way of SyncBatchNorm for those of converted layers in training; for others it does what it did. In eval() a
/// converted layer is as before. A clone() is a layer of its own, not converted.
///
/// Exact for uneven batches, a rank without samples included ([0, channels, ...]); not for a rank with a single value
/// a channel, which torch's forward refuses before it gets here: declare a SyncBatchNorm for that.
///
/// TORCH_CHECK fails, and nothing is converted, where there is no batch norm, or one whose conversion would have no
/// effect or an unknown one: a class derived from BatchNorm, whose forward may do anything, and a layer with neither
/// parameters nor running statistics to recognise it by.
///
/// Every rank must call it, with equal modules; then forward and backward of each layer are collectives, of a message
/// each, that every rank must run in the same order, empty batch or not. Layers over one group share a connection of
/// their own, so that they and reductions of gradients do not meet. Forward must not be run by several threads at once.
/// create_graph through it is refused.
int64_t convert_sync_batchnorm(torch::nn::Module& module, const Group& group);

/// The same for a TorchScript module, of torch.jit.script or of torch.jit.trace in train(), before its first forward:
/// its methods are run as they were written from then on, without the optimizations of TorchScript's executor, which
/// would take them out of the layers' sight. (Forward in training of one that the executor had optimized before is
/// refused.) TORCH_CHECK also fails for functional batch norm and for layers traced in eval().
int64_t convert_sync_batchnorm(const torch::jit::Module& module, const Group& group);

struct StatisticsExchange;

/// A batch norm that is synchronised from the start, for input [batch, channels, ...] of two dimensions or more;
/// options, parameters, buffers and names are those of torch::nn::BatchNorm. What is said above holds for it; a rank
/// may have a single value a channel if another has one too.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// Every rank of `group` must make it.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& like, const Group& group);
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  void remember();

  std::shared_ptr<StatisticsExchange> exchange_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep
