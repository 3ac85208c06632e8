#include "reducer/followed_result.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "reducer/gradient_hook.h"
#include "reducer/operation_kind.h"

namespace lockstep {
namespace {

using torch::autograd::variable_list;

/// Tells of every backward through the operation that it is put on.
class ResultHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit ResultHook(FollowedResult passes) : passes_(std::move(passes)) { ++alive_; }
  ~ResultHook() override { --alive_; }
  ResultHook(const ResultHook&) = delete;
  variable_list operator()(const variable_list& gradients) override {
    passes_(current_backward(), way_);
    return gradients;
  }
  /// Of the backward that begins.
  void set_way(WayToResult way) { way_ = std::move(way); }

  static bool any() { return alive_.load(std::memory_order_relaxed) > 0; }
  /// That of the operation, or null.
  static ResultHook* on(torch::autograd::Node& operation) {
    for (const auto& hook : operation.tensor_pre_hooks())
      if (auto* const own = dynamic_cast<ResultHook*>(hook.get())) return own;
    return nullptr;
  }

 private:
  inline static std::atomic<int> alive_{0};
  const FollowedResult passes_;
  WayToResult way_;
};

std::vector<torch::autograd::Node*> inputs_of(const torch::autograd::Node& operation) {
  std::vector<torch::autograd::Node*> inputs;
  for (const auto& edge : operation.next_edges())
    if (edge.function) inputs.push_back(edge.function.get());
  return inputs;
}

/// Whether a followed result is among what operations were computed with.
class Origins {
 public:
  bool any_followed(torch::autograd::Node* operation) {
    std::vector<torch::autograd::Node*> waiting{operation}, looked_at;
    while (!waiting.empty()) {
      torch::autograd::Node* const one = waiting.back();
      waiting.pop_back();
      if (ResultHook::on(*one) != nullptr) {
        for (const auto* other : looked_at) without_.erase(other);  // which may lie above it
        return true;
      }
      if (!without_.insert(one).second) continue;
      looked_at.push_back(one);
      for (torch::autograd::Node* input : inputs_of(*one)) waiting.push_back(input);
    }
    return false;
  }

 private:
  std::unordered_set<const torch::autograd::Node*> without_;
};

/// The sum of which a backward takes the gradient: followed results, and other summands. An operation with one input
/// passes the gradient on, one that adds or chooses passes it to each input, and a product to its factor that comes
/// from a followed result; what a program's own operations do with several is not looked into.
class RootSum {
 public:
  explicit RootSum(const torch::autograd::edge_list& roots) {
    for (const auto& root : roots) expand(root.function.get(), "");
  }
  /// Tells followed results what the other summands reach, and what they went through.
  void tell() const {
    if (followed_.empty()) return;
    auto beside = std::make_shared<Leaves>();
    for (torch::autograd::Node* summand : others_) add_leaves_of(summand, *beside);
    const auto told = beside->empty() ? nullptr : std::shared_ptr<const Leaves>(std::move(beside));
    for (const auto& [hook, nonlinear] : followed_) hook->set_way({.beside = told, .nonlinear = nonlinear});
  }

 private:
  /// `nonlinear`: one that the gradient has come through; empty: none.
  void expand(torch::autograd::Node* operation, std::string nonlinear) {
    while (operation != nullptr && seen_[nonlinear.empty() ? 0 : 1].insert(operation).second) {
      if (ResultHook* const hook = ResultHook::on(*operation)) {
        std::string& known = followed_[hook];
        if (known.empty()) known = nonlinear;
        return;
      }
      const auto inputs = inputs_of(*operation);
      if (inputs.size() != 1) return expand_several(operation, inputs, nonlinear);
      const std::string name = operation->name();
      const OperationKind kind = kind_of(name);
      // The divisor alone requires grad, and not the number that is divided.
      const bool divides = kind == OperationKind::kQuotient && !operation->next_edge(0).is_valid();
      if (nonlinear.empty() && (kind == OperationKind::kNonlinear || divides)) nonlinear = name;
      operation = inputs.front();
    }
  }
  void expand_several(torch::autograd::Node* operation, const std::vector<torch::autograd::Node*>& inputs,
                      const std::string& nonlinear) {
    const std::string name = operation->name();
    const OperationKind kind = inputs.empty() ? OperationKind::kUnknown : kind_of(name);
    if (kind == OperationKind::kLinear) {
      for (torch::autograd::Node* input : inputs) expand(input, nonlinear);
      return;
    }
    std::vector<torch::autograd::Node*> followed;
    if (kind != OperationKind::kUnknown)
      std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(followed),
                   [&](torch::autograd::Node* input) { return origins_.any_followed(input); });
    if (followed.empty()) return others_.push_back(operation);
    const bool divides = kind == OperationKind::kQuotient && followed.front() != inputs.front();
    const bool is_linear = kind != OperationKind::kNonlinear && followed.size() == 1 && !divides;
    for (torch::autograd::Node* input : followed) expand(input, is_linear || !nonlinear.empty() ? nonlinear : name);
  }
  /// Unless a followed result is among what it was computed from: then its gradient may well be scaled.
  static void add_leaves_of(torch::autograd::Node* summand, Leaves& leaves) {
    std::unordered_set<torch::autograd::Node*> seen{summand};
    std::vector<torch::autograd::Node*> waiting{summand};
    Leaves found;
    while (!waiting.empty()) {
      torch::autograd::Node* const operation = waiting.back();
      waiting.pop_back();
      if (ResultHook::on(*operation) != nullptr) return;
      if (auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(operation))
        found.insert(leaf->variable.unsafeGetTensorImpl());
      for (torch::autograd::Node* input : inputs_of(*operation))
        if (seen.insert(input).second) waiting.push_back(input);
    }
    leaves.insert(found.begin(), found.end());
  }

  std::map<ResultHook*, std::string> followed_;  ///< with what is nonlinear on the way to it
  std::vector<torch::autograd::Node*> others_;
  std::unordered_set<torch::autograd::Node*> seen_[2];  ///< by linear ways, and by others
  Origins origins_;
};

}  // namespace

void tell_followed_results(const torch::autograd::edge_list& roots) {
  if (ResultHook::any()) RootSum(roots).tell();
}

void follow_result(const at::Tensor& result, FollowedResult passes) {
  watch_engine();
  if (const auto operation = result.grad_fn())
    operation->add_tensor_pre_hook(std::make_unique<ResultHook>(std::move(passes)));
}

bool comes_from_followed_result(const at::Tensor& tensor) {
  const auto last = tensor.grad_fn();  // keeps the others
  return last && ResultHook::any() && Origins().any_followed(&*last);
}

}  // namespace lockstep
