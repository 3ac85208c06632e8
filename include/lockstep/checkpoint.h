#pragma once

#include <cfloat>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
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
  /// Missing and unknown names are an error. If false, the tensors that fit are loaded. A different shape is always an
  /// error.
  bool strict = true;
};

/// The result of load_state_dict().
struct LoadStateReport {
  std::vector<std::string> missing{};     ///< names in the module but not in the state
  std::vector<std::string> unexpected{};  ///< names in the state but not in the module
  /// The prefix that was removed from names, such as "module." of Python's DistributedDataParallel. Usually empty.
  std::string removed_prefix{};
};

/// Copies the tensors into the module's. If names do not match, prefixes that Python's wrappers add (`module.` and
/// `_orig_mod.`) are removed if more names then match, with one TORCH_WARN. Throws Error before anything is changed. It
/// lists all names that are missing, unknown or of another shape, and for each missing name the most similar one in the
/// state.
LoadStateReport load_state_dict(torch::nn::Module& module, const StateDict& state, LoadStateOptions options = {});

/// The state that SGD, Adam, AdamW, RMSprop or Adagrad keeps for each parameter, as "<index of the
/// parameter>.<PyTorch's name>", e.g. "3.momentum_buffer". It holds no options such as the learning rate: the program
/// sets them. TORCH_CHECK fails for other optimizers.
[[nodiscard]] StateDict state_dict(const torch::optim::Optimizer& optimizer);

/// The inverse, for an optimizer of the same kind over the same parameters; its previous state is discarded. Throws
/// Error, before anything is changed, listing all entries that are missing, unknown or of another shape.
void load_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state);

/// As above, with the options, in the layout of Python's Optimizer.state_dict(): {"state": {0: {"step": ...}},
/// "param_groups": [{"lr": ..., "params": [0, 1]}]}. Python's load_state_dict accepts it, and training can continue
/// there.
[[nodiscard]] c10::IValue optimizer_state_dict(const torch::optim::Optimizer& optimizer);

/// The reverse, for files from either language. It also sets options, including the learning rate. Throws Error before
/// anything is changed, also for options that C++ does not have, such as `maximize`.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);

/// Puts `prefix` before each name, so that one file can hold several states.
[[nodiscard]] StateDict with_prefix(const std::string& prefix, const StateDict& state);
/// The entries whose names start with `prefix`, without it.
[[nodiscard]] StateDict without_prefix(const std::string& prefix, const StateDict& state);

/// The contents of a checkpoint file.
struct Checkpoint {
  StateDict tensors{};
  std::map<std::string, std::string> metadata{};  ///< texts, such as the epoch
};

/// The file name decides the format: .safetensors for Python's safetensors package, or .pt (or .pth) for torch.load
/// (weights_only, also with mmap=True). A .pt file stores the metadata among the tensors, and tensors that share memory
/// share it again when loaded. Atomic: a new, synced file replaces the old one, so a complete file has the name at
/// every instant. Call it on one rank. Throws Error, naming the file, if it cannot be written or another process is
/// writing it; the old file then remains. A process that is killed while saving leaves "<path>.partial", which the next
/// save reuses.
void save(const Checkpoint& checkpoint, const std::string& path);
void save(const StateDict& state, const std::string& path);

/// Reads a .safetensors file, or a file that Python's torch.save wrote, into CPU memory. In nested dictionaries and
/// lists, a tensor's name is its keys joined by dots. Numbers, booleans and None become metadata, as JSON. Nothing in
/// the file is trusted: sizes are checked before memory is allocated, and no code is run. docs/checkpoints.md lists
/// what is supported. Throws Error, naming the file and the tensor.
[[nodiscard]] Checkpoint load(const std::string& path);

struct LoadObjectOptions {
  /// Map the file instead of reading it: tensors are read on first use, and changes to them stay in this process.
  /// Checksums are not verified. The file must not be modified in place meanwhile; replacing it by a new file, as
  /// save() does, is harmless.
  bool mmap = false;
};

/// Reads any .pt file that Python's torch.load (weights_only) reads: dictionaries, lists, tuples, strings, numbers,
/// None and tensors. A torch.Size becomes a tuple; a device, a dtype or bytes a string; a set a list; and a NumPy
/// scalar a number. Tensors that share memory share it again.
[[nodiscard]] c10::IValue load_object(const std::string& path, LoadObjectOptions options = {});

/// The reverse, as atomic as save(). Takes dictionaries (with strings or integers as keys), lists, tuples, strings,
/// numbers, booleans, None and tensors; TORCH_CHECK fails for anything else.
void save_object(const c10::IValue& object, const std::string& path);

/// The tensors as a dictionary, for use in an object.
[[nodiscard]] c10::IValue to_object(const StateDict& state);
/// The reverse; the keys of nested dictionaries are joined by dots. Throws Error for anything that is not a tensor.
[[nodiscard]] StateDict to_state_dict(const c10::IValue& object);

/// 16 hexadecimal digits that depend on the names, dtypes, shapes and every bit of the tensors. Equal states have equal
/// hashes.
[[nodiscard]] std::string hash(const StateDict& state);

namespace detail {
/// Converts a variable of the program to a part of a checkpoint, and back. Throws Error if the file has a value of
/// another kind, and for numbers that the variable, or the file, cannot hold.
int64_t whole_number_of(const c10::IValue& state, int64_t least, int64_t most);
double number_of(const c10::IValue& state, double most);
bool bool_of(const c10::IValue& state);
std::string string_of(const c10::IValue& state);
void check_whole_number(uint64_t value);
template <typename T>
c10::IValue saved_value(const T& value) {
  if constexpr (std::is_integral_v<T> && !std::same_as<T, bool>) {
    if constexpr (std::numeric_limits<T>::digits > 63) check_whole_number(value);
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(value);
  } else {
    return value;
  }
}
template <typename T>
void load_value(const c10::IValue& state, T& value) {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::same_as<T, std::string>)
    value = string_of(state);
  else if constexpr (std::same_as<T, bool>)
    value = bool_of(state);
  else if constexpr (std::is_floating_point_v<T>)
    value = static_cast<T>(number_of(state, Limits::digits < 53 ? static_cast<double>(Limits::max()) : DBL_MAX));
  else
    value = static_cast<T>(whole_number_of(state, static_cast<int64_t>(Limits::min()),
                                           Limits::digits > 63 ? INT64_MAX : static_cast<int64_t>(Limits::max())));
}
}  // namespace detail

}  // namespace lockstep
