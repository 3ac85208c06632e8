#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/state_dict.h>

namespace lockstep {

/// The module's parameters and buffers under PyTorch's names. The tensors are the module's own, not copies.
[[nodiscard]] StateDict state_dict(const torch::nn::Module& module);

struct LoadStateOptions {
  /// Names that are missing or unknown are an error. Otherwise what fits is loaded; another shape is always an error.
  bool strict = true;
};

/// What load_state_dict found.
struct LoadStateReport {
  std::vector<std::string> missing;     ///< names of the module that the state has not
  std::vector<std::string> unexpected;  ///< names of the state that the module has not
  /// What was left out at the start of names, such as "module." of Python's DistributedDataParallel; mostly empty.
  std::string removed_prefix;
};

/// Copies the tensors into the module's. Where names do not match, the prefixes that Python's wrappers leave,
/// `module.` and `_orig_mod.`, are taken off if more of them match then, which is said once, as a TORCH_WARN.
/// Throws Error, before anything is changed, that lists all names that are missing, unknown or of another shape, each
/// missing one with the nearest that is there.
LoadStateReport load_state_dict(torch::nn::Module& module, const StateDict& state, LoadStateOptions options = {});

/// What SGD, Adam, AdamW, RMSprop or Adagrad remember of each parameter, as "<place of the parameter>.<PyTorch's
/// name>", e.g. "3.momentum_buffer". Options such as the learning rate are not in it: the program sets them.
/// TORCH_CHECK fails for other optimizers.
[[nodiscard]] StateDict state_dict(const torch::optim::Optimizer& optimizer);

/// The reverse, for an optimizer of the same kind over the same parameters: what it remembered before is forgotten.
/// Throws Error, before anything is changed, that lists all entries that are missing, unknown or of another shape.
void load_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state);

/// The same with the options, in the layout of Python's Optimizer.state_dict(): {"state": {0: {"step": ...}},
/// "param_groups": [{"lr": ..., "params": [0, 1]}]}. Python's load_state_dict takes it, and training goes on there.
[[nodiscard]] c10::IValue optimizer_state_dict(const torch::optim::Optimizer& optimizer);

/// The reverse, for what either language wrote. Sets options too, the learning rate among them. Throws Error, before
/// anything is changed, also for options that C++ has not, such as `maximize`.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);

/// `prefix` before each name: to put several states in one file.
[[nodiscard]] StateDict with_prefix(const std::string& prefix, const StateDict& state);
/// The entries that start with `prefix`, without it.
[[nodiscard]] StateDict without_prefix(const std::string& prefix, const StateDict& state);

/// What a checkpoint file holds.
struct Checkpoint {
  StateDict tensors;
  std::map<std::string, std::string> metadata;  ///< texts, such as the epoch
};

/// Writes a .safetensors file, which Python's safetensors package reads too, or a .pt (or .pth) file for torch.load
/// (weights_only, also with mmap=True), as the name says. In a .pt file the texts stand among the tensors, and tensors
/// that share memory share it again when they are loaded.
/// Atomic: a new file, synced, takes the place of the old one, so that there is a whole file under the name at any
/// instant. One rank calls it. Throws Error, naming the file, if it cannot be written, or another process is just
/// writing it; the old one is then still there. A process that is killed meanwhile leaves "<path>.partial" behind,
/// which the next save takes over.
void save(const Checkpoint& checkpoint, const std::string& path);
void save(const StateDict& state, const std::string& path);

/// Reads a .safetensors file, or what Python's torch.save wrote, into CPU memory. Of nested dictionaries and lists the
/// tensors' names are the keys joined by dots; numbers, truth values and None become texts of the metadata, as JSON.
/// Nothing in the file is trusted: sizes are checked before memory is taken and no code is run; docs/checkpoints.md
/// lists what is read. Throws Error, naming the file and the tensor.
[[nodiscard]] Checkpoint load(const std::string& path);

struct LoadObjectOptions {
  /// Map the file instead of reading it: tensors are read when they are used, and changes to them stay in this
  /// process. Checksums are not looked at. The file must not be changed in place meanwhile (a new file in its place,
  /// as save() makes it, does no harm).
  bool mmap = false;
};

/// Whatever Python's torch.load (weights_only) reads from a .pt file: dictionaries, lists, tuples, texts, numbers,
/// None and tensors; a torch.Size is a tuple, a device or dtype a text, a set a list, bytes a text, a NumPy scalar a
/// number. Tensors that share memory do so again.
[[nodiscard]] c10::IValue load_object(const std::string& path, LoadObjectOptions options = {});

/// The reverse, atomic as save() is: dictionaries (keys: texts or whole numbers), lists, tuples, texts, numbers, truth
/// values, None and tensors. TORCH_CHECK fails for anything else.
void save_object(const c10::IValue& object, const std::string& path);

/// A dictionary of the tensors, to be put into an object.
[[nodiscard]] c10::IValue to_object(const StateDict& state);
/// The reverse: the tensors under their names; in nested ones the keys are joined by dots. Throws Error for what is no
/// tensor.
[[nodiscard]] StateDict to_state_dict(const c10::IValue& object);

/// 16 hexadecimal digits that depend on names, dtypes, shapes and every bit of the tensors: equal states, equal hash.
[[nodiscard]] std::string hash(const StateDict& state);

}  // namespace lockstep
