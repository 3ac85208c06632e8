#include <map>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <lockstep/checkpoint.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/shared_weights.h"
#include "base/weights_set.h"
#include "checkpoint/state_fit.h"
#include "checkpoint/state_hash.h"
#include "collectives/sample.h"
#include "collectives/storages.h"

namespace lockstep {
namespace {

constexpr size_t kMaxLookedUp = 100;  // names whose nearest match is searched, which is slow

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) state.insert(item.key(), item.value());
  for (const auto& item : module.named_buffers()) state.insert(item.key(), item.value());
  return state;
}

LoadStateReport load_state_dict(torch::nn::Module& module, const StateDict& state, LoadStateOptions options) {
  const StateDict own = state_dict(module);
  LoadStateReport report{.missing = {}, .unexpected = {}, .removed_prefix = prefix_to_remove(own.keys(), state.keys())};
  std::map<std::string, at::Tensor> given;
  for (const auto& item : state) given[without(report.removed_prefix, item.key())] = item.value();
  std::string problems;
  for (const auto& [name, tensor] : given)
    if (!own.contains(name)) report.unexpected.push_back(name);
  size_t looked_up = 0;
  for (const auto& item : own) {
    const auto found = given.find(item.key());
    if (found == given.end()) {
      report.missing.push_back(item.key());
      if (!options.strict) continue;
      problems += "\n  missing: " + item.key();
      const std::string near = looked_up++ < kMaxLookedUp ? nearest_name(item.key(), report.unexpected) : std::string();
      if (!near.empty()) problems += " (near: " + near + ")";
    } else if (const auto problem = problem_of_copy(found->second, item.value(), "the module"); !problem.empty()) {
      problems += "\n  " + item.key() + ": " + problem;
    } else if (found->second.sizes() != item.value().sizes()) {
      problems += "\n  shape of " + item.key() + ": " + shape_of(found->second) + " given, " + shape_of(item.value()) +
                  " in the module";
    }
  }
  if (options.strict)
    for (const std::string& name : report.unexpected) problems += "\n  unknown: " + name;
  if (!problems.empty()) throw RefusedInput("the state does not fit the module:" + problems);
  if (!report.removed_prefix.empty()) {
    TORCH_WARN("the names of the state start with `", report.removed_prefix,
               "`, which a Python wrapper added; the prefix was removed to match the names in the module");
  }
  std::vector<at::Tensor> tensors;
  for (const auto& item : own) tensors.push_back(item.value());
  const auto storages = storages_of(tensors);
  // Loading a part of the state does not repair the rest.
  const bool stays_wrong = !report.missing.empty() && !trouble_of(shared_weights_in(storages)).empty();
  at::NoGradGuard no_grad;
  for (const auto& item : own)
    if (const auto found = given.find(item.key()); found != given.end()) at::Tensor(item.value()).copy_(found->second);
  if (stays_wrong) return report;
  uint64_t values = 0;
  for (const auto& [name, tensor] : given)
    if (own.contains(name) && tensor.is_cpu() && !shared_weights_in(storages).empty())
      values = Hash::mixed(values, sample_of(tensor));
  note_weights_loaded(storages, values);
  return report;
}

StateDict with_prefix(const std::string& prefix, const StateDict& state) {
  StateDict result;
  for (const auto& item : state) result.insert(prefix + item.key(), item.value());
  return result;
}

StateDict without_prefix(const std::string& prefix, const StateDict& state) {
  StateDict result;
  for (const auto& item : state)
    if (item.key().starts_with(prefix)) result.insert(item.key().substr(prefix.size()), item.value());
  return result;
}

std::string hash(const StateDict& state) {
  Hash hash;
  for (const auto& item : state) add_to_hash(hash, item.key(), item.value());
  return hash.digits();
}

}  // namespace lockstep
