#pragma once

#include <string>

#include <torch/csrc/jit/api/module.h>

#include <lockstep/state_dict.h>

namespace lockstep::train_c {

/// Throws LOCKSTEP_TRAIN_FILE_FAILED, naming the file.
torch::jit::Module load_script(const std::string& path);

/// Writes a module as TorchScript; the file is complete at every instant. Throws StorageError, naming the file.
void save_script(const torch::jit::Module& module, const std::string& path);

/// A hash of the module's code, without the numbers that TorchScript gives its types in the order of loading.
std::string code_hash(const torch::jit::Module& module);

/// The module's own parameters and buffers.
StateDict state_of_script(const torch::jit::Module& module);

/// Copies tensors into the module's. Throws LOCKSTEP_INVALID_ARGUMENT before anything is changed, unless names, shapes
/// and dtypes are the same.
void copy_state(const std::string& where, const StateDict& from, const torch::jit::Module& to);

}  // namespace lockstep::train_c
