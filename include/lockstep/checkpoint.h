#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

/// Tensors by name, in order.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// The module's parameters and buffers under PyTorch's names. The tensors are the module's own, not copies.
StateDict state_dict(const torch::nn::Module& module);

/// Copies the tensors into the module's. Throws Error, before anything is changed, that lists all names that are
/// missing, unknown or of another shape.
void load_state_dict(torch::nn::Module& module, const StateDict& state);

/// What SGD, Adam or AdamW remember of each parameter, as "<place of the parameter>.<PyTorch's name>", e.g.
/// "3.momentum_buffer". Options such as the learning rate are not in it: the program sets them. TORCH_CHECK fails for
/// other optimizers.
StateDict state_dict(const torch::optim::Optimizer& optimizer);

/// The reverse, for an optimizer of the same kind over the same parameters: what it remembered before is forgotten.
/// Throws Error, before anything is changed, that lists all entries that are missing, unknown or of another shape.
void load_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state);

/// `prefix` before each name: to put several states in one file.
StateDict with_prefix(const std::string& prefix, const StateDict& state);
/// The entries that start with `prefix`, without it.
StateDict without_prefix(const std::string& prefix, const StateDict& state);

/// What a checkpoint file holds.
struct Checkpoint {
  StateDict tensors;
  std::map<std::string, std::string> metadata;  ///< texts, such as the epoch
};

/// Writes a .safetensors file, which Python's safetensors package reads too. Atomic: a new file, synced, takes the
/// place of the old one, so that there is a whole file under the name at any instant. One rank calls it.
/// Throws Error, naming the file, if it cannot be written, or another process is just writing it; the old one is then
/// still there. A process that is killed meanwhile leaves "<path>.partial" behind, which the next save takes over.
void save(const Checkpoint& checkpoint, const std::string& path);

/// Reads a .safetensors file into CPU memory. Nothing in the file is trusted: sizes are checked before memory is
/// taken and no code is run. Throws Error, naming the file and the tensor.
Checkpoint load(const std::string& path);

/// 16 hexadecimal digits that depend on names, dtypes, shapes and every bit of the tensors: equal states, equal hash.
std::string hash(const StateDict& state);

}  // namespace lockstep
