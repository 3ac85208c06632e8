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
#include "reducer/whole_backward.h"

namespace lockstep {
namespace {

using torch::autograd::variable_list;

/// Reports every backward through the operation to which it is attached.
class ResultHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit ResultHook(FollowedResult passes) : passes_(std::move(passes)) { ++alive_; }
  ~ResultHook() override { --alive_; }
  ResultHook(const ResultHook&) = delete;
  variable_list operator()(const variable_list& gradients) override {
    passes_(current_backward(), way_);
    return gradients;
  }
  /// For the backward that begins.
  void set_way(WayToResult way) { way_ = std::move(way); }

  static bool any() { return alive_.load(std::memory_order_relaxed) > 0; }
  /// The hook of the operation, or null.
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

/// Finds out whether a followed result is among the inputs of operations.
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

/// The sum whose gradient a backward takes: followed results, and other summands. An operation with one input passes
/// the gradient on, one that adds or selects passes it to each input, and a product to its factor that comes from a
/// followed result. A program's own operations with several inputs are not analysed.
class RootSum {
 public:
  explicit RootSum(const torch::autograd::edge_list& roots) {
    for (const auto& root : roots) expand(root.function.get(), {});
  }
  /// Tells followed results which leaves the other summands reach, and which operations they went through.
  void tell() const {
    if (followed_.empty()) return;
    auto beside = std::make_shared<Leaves>();
    for (torch::autograd::Node* summand : others_) add_leaves_of(summand, *beside);
    const auto told = beside->empty() ? nullptr : std::shared_ptr<const Leaves>(std::move(beside));
    for (const auto& [hook, nonlinear] : followed_) hook->set_way({.beside = told, .nonlinear = nonlinear});
  }

 private:
  using Operation = torch::autograd::Node;
  /// The names of operations between the root and an operation; empty: none.
  struct Way {
    std::string kinked;     ///< one that is nonlinear because of a constant input
    std::string nonlinear;  ///< one whose gradient is not a multiple of its inputs'
    size_t kind() const { return !nonlinear.empty() ? 2 : !kinked.empty() ? 1 : 0; }
    Way through(const std::string& name) const { return {kinked, nonlinear.empty() ? name : nonlinear}; }
  };

  void expand(Operation* operation, Way way) {
    while (operation != nullptr && seen_[way.kind()].insert(operation).second) {
      if (ResultHook* const hook = ResultHook::on(*operation)) {
        std::string& known = followed_[hook];
        if (known.empty()) known = way.nonlinear;
        return;
      }
      const auto inputs = inputs_of(*operation);
      const std::string name = operation->name();
      const OperationKind kind = inputs.empty() ? OperationKind::kUnknown : kind_of(name);
      way = beyond(*operation, kind, name, inputs.size(), way);
      if (!inputs.empty() && runs_backward_itself(*operation)) return expand_checkpoint(operation, inputs, way);
      const bool is_added = kind == OperationKind::kAddedProduct || kind == OperationKind::kAddedQuotient ||
                            kind == OperationKind::kBiasedProduct;
      if (is_added && operation->num_outputs() == 3) return expand_added(*operation, kind, way);
      if (inputs.size() != 1) return expand_several(operation, kind, inputs, way);
      operation = inputs.front();
    }
  }
  /// The way to the inputs, `inputs` of which take a gradient.
  static Way beyond(const Operation& operation, OperationKind kind, const std::string& name, size_t inputs, Way way) {
    const bool has_constant = inputs < operation.num_outputs();
    switch (kind) {
      case OperationKind::kKinked:
        if (has_constant) return way.through(name);
        way.kinked = name;
        return way;
      case OperationKind::kJoin:
      case OperationKind::kSum: {
        const bool adds_constant = has_constant || (kind == OperationKind::kSum && inputs == 1);
        return adds_constant && !way.kinked.empty() ? way.through(way.kinked) : way;
      }
      case OperationKind::kAddedProduct:
      case OperationKind::kAddedQuotient:
        if (!operation.next_edge(0).is_valid() && !way.kinked.empty()) way = way.through(way.kinked);
        return way;
      case OperationKind::kQuotient:
        // Only the divisor requires grad, not the dividend.
        return inputs == 1 && !operation.next_edge(0).is_valid() ? way.through(name) : way;
      case OperationKind::kNonlinear:
        return way.through(name);
      default:
        return way;
    }
  }
  void expand_several(Operation* operation, OperationKind kind, const std::vector<Operation*>& inputs, const Way& way) {
    if (kind == OperationKind::kLinear || kind == OperationKind::kJoin || kind == OperationKind::kSum ||
        kind == OperationKind::kKinked) {
      for (Operation* input : inputs) expand(input, way);
      return;
    }
    std::vector<Operation*> followed;
    if (kind != OperationKind::kUnknown)
      std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(followed),
                   [&](Operation* input) { return origins_.any_followed(input); });
    if (followed.empty()) return others_.push_back(operation);
    const bool divides = kind == OperationKind::kQuotient && followed.front() != inputs.front();
    const bool is_linear = followed.size() == 1 && !divides;
    for (Operation* input : followed) expand(input, is_linear ? way : way.through(operation->name()));
  }
  /// A checkpointed function's operations on a followed result are unknown until backward.
  void expand_checkpoint(Operation* operation, const std::vector<Operation*>& inputs, const Way& way) {
    bool any = false;
    for (Operation* input : inputs)
      if (origins_.any_followed(input)) {
        any = true;
        expand(input, way.through(kCheckpointed));
      }
    if (!any) others_.push_back(operation);
  }
  /// An operation that adds the product, or the quotient, of two inputs to its first or its last.
  void expand_added(const Operation& operation, OperationKind kind, const Way& way) {
    const bool adds_last = kind == OperationKind::kBiasedProduct;
    expand(operation.next_edge(adds_last ? 2 : 0).function.get(), way);
    Operation *const one = operation.next_edge(adds_last ? 0 : 1).function.get(),
                     *const other = operation.next_edge(adds_last ? 1 : 2).function.get();
    const bool of_one = one != nullptr && origins_.any_followed(one),
               of_other = other != nullptr && origins_.any_followed(other);
    const bool divides = kind == OperationKind::kAddedQuotient && of_other;
    const Way beyond = divides || (of_one && of_other) ? way.through(operation.name()) : way;
    for (const auto& [factor, is_followed] : {std::pair(one, of_one), std::pair(other, of_other)}) {
      if (is_followed)
        expand(factor, beyond);
      else if (factor != nullptr && !of_one && !of_other)
        others_.push_back(factor);
    }
  }
  /// Unless it was computed from a followed result, in which case its gradient may well be scaled.
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

  std::map<ResultHook*, std::string> followed_;  ///< with the nonlinear operation on the way to it
  std::vector<torch::autograd::Node*> others_;
  std::unordered_set<torch::autograd::Node*> seen_[3];  ///< by Way::kind()
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
