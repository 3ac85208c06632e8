#pragma once

#include <cstdint>

#include <torch/csrc/api/include/torch/nn/modules/batchnorm.h>

#include <lockstep/group.h>

namespace torch::jit {
struct Module;
}

namespace lockstep {

/// Makes every BatchNorm1d, 2d and 3d in `module` take its training statistics over the batches of all ranks of
/// `group`, as if their samples were one batch. Returns the number of such layers. A module without any is unchanged:
/// the result is 0, and rank 0 warns once by TORCH_WARN.
///
///     Net net;                                              // its forward calls bn->forward(x)
///     lockstep::convert_sync_batchnorm(*net, context.group());
///     lockstep::DistributedDataParallel model(net, context);
///
/// Nothing in the module is replaced: layers, parameters, buffers and names stay, and existing handles to a layer (a
/// ModuleHolder, a Sequential) refer to the synchronised one. The change is in torch's operator: from the first
/// conversion on, this process's batch norm looks up its running mean or weight, and works like SyncBatchNorm for
/// converted layers in training. Other layers are unaffected. In eval() a converted layer works as before. A clone() is
/// not converted.
///
/// Exact for uneven batches, including ranks without samples ([0, channels, ...]). Torch's own forward refuses a single
/// value per channel on a rank; declare a SyncBatchNorm for that.
///
/// TORCH_CHECK fails, and nothing is converted, if converting a layer would have no effect or an unknown one: a class
/// derived from BatchNorm, whose forward may do anything, or a layer with neither parameters nor running statistics,
/// which could not be recognised. Ranks with different layers (number, names, channels) are an Error on all of them.
///
/// Every rank must call it, with equal modules. Afterwards forward and backward of each layer are collectives of one
/// message each, which every rank must run in the same order, even with an empty batch. If a rank does not (it skips a
/// step because of its own loss, or is in eval()), all ranks get an Error within seconds that names the layer. The
/// layers of a group have a connection of their own, separate from reductions of gradients. Forward must not be run by
/// several threads at once. create_graph through a layer is refused.
int64_t convert_sync_batchnorm(torch::nn::Module& module, const Group& group);

/// As above, for a TorchScript module, from torch.jit.script or from torch.jit.trace in train(), before its first
/// forward. Its methods then run without the optimizations of TorchScript's executor, which would hide the batch norm
/// layers. (Forward in training is refused if the executor had already optimized the module.) TORCH_CHECK also fails
/// for functional batch norm and for layers traced in eval().
int64_t convert_sync_batchnorm(const torch::jit::Module& module, const Group& group);

struct LayerExchange;

/// A batch norm that is synchronised from the start, for input [batch, channels, ...] of two or more dimensions.
/// Options, parameters, buffers and names are those of torch::nn::BatchNorm. Everything above applies, and a rank may
/// have a single value per channel if another rank has one, too.
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

  std::shared_ptr<LayerExchange> exchange_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep
