#include "train_c/script.h"

#include <cctype>
#include <sstream>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/script.h>

#include "base/atomic_file.h"
#include "base/hash.h"
#include "collectives/cause.h"
#include "train_c/arrays.h"
#include "train_c/guarded.h"

namespace lockstep::train_c {
namespace {

/// TorchScript tells types of one name apart by "___torch_mangle_7".
std::string without_numbers(const std::string& code) {
  constexpr std::string_view kMangle = "___torch_mangle_";
  std::string result;
  size_t at = 0;
  for (size_t found = code.find(kMangle); found != std::string::npos; found = code.find(kMangle, at)) {
    result.append(code, at, found - at);
    at = found + kMangle.size();
    while (at < code.size() && std::isdigit(static_cast<unsigned char>(code[at])) != 0) ++at;
  }
  return result.append(code, at);
}

}  // namespace

torch::jit::Module load_script(const std::string& path) {
  std::string why;
  try {
    return torch::jit::load(path, torch::kCPU);
  } catch (const std::exception& error) {
    why = cause_of(error);
  }
  throw StatusError(
      LOCKSTEP_TRAIN_FILE_FAILED,
      path.substr(0, 200) +
          " cannot be read as TorchScript (what torch.jit.script(module).save(path) writes): " + why.substr(0, 300));
}

void save_script(const torch::jit::Module& module, const std::string& path) {
  std::ostringstream content;
  module.save(content);
  const std::string bytes = std::move(content).str();
  try {
    AtomicFile file(path);
    file.write(bytes.data(), bytes.size());
    file.commit();
  } catch (const Error& error) {
    throw StatusError(LOCKSTEP_TRAIN_FILE_FAILED, error.what());
  }
}

std::string code_hash(const torch::jit::Module& module) {
  Hash hash;
  for (const auto& item : module.named_modules()) {
    hash.add(item.name);
    for (const torch::jit::Method& method : item.value.get_methods())
      hash.add(method.name() + without_numbers(method.graph()->toString(/*print_source_locations=*/false)));
  }
  return hash.digits();
}

StateDict state_of_script(const torch::jit::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) state.insert(item.name, item.value);
  for (const auto& item : module.named_buffers()) state.insert(item.name, item.value);
  return state;
}

void copy_state(const std::string& where, const StateDict& from, const torch::jit::Module& to) {
  const StateDict state = state_of_script(to);
  std::string problems;
  for (const auto& item : state) {
    const at::Tensor* const source = from.find(item.key());
    if (source == nullptr)
      problems += "\n  " + item.key() + " is missing";
    else if (source->sizes() != item.value().sizes() || source->scalar_type() != item.value().scalar_type())
      problems += "\n  " + item.key() + " is " + text_of(*source) + ", the model's is " + text_of(item.value());
  }
  for (const auto& item : from)
    if (!state.contains(item.key())) problems += "\n  " + item.key() + " is not in the model";
  if (!problems.empty()) refuse(where, "the weights do not fit the model:" + problems);
  const at::NoGradGuard no_grad;
  for (const auto& item : state) at::Tensor(item.value()).copy_(from[item.key()]);
}

}  // namespace lockstep::train_c
