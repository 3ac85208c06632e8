#include "reducer/followed_result.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "reducer/gradient_hook.h"

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
    passes_(current_backward(), beside_);
    return gradients;
  }
  /// Of the backward that begins.
  void set_beside(std::shared_ptr<const Leaves> beside) { beside_ = std::move(beside); }

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
  std::shared_ptr<const Leaves> beside_;
};

/// The sum of which a backward takes the gradient: followed results, and other summands. An operation with one input
/// passes the gradient on; one that adds passes it to each summand; others are not looked into.
class RootSum {
 public:
  explicit RootSum(const torch::autograd::edge_list& roots) {
    for (const auto& root : roots) expand(root.function.get());
  }
  /// Tells followed results what the other summands reach.
  void tell() const {
    if (followed_.empty()) return;
    auto beside = std::make_shared<Leaves>();
    for (torch::autograd::Node* summand : others_) add_leaves_of(summand, *beside);
    const auto told = beside->empty() ? nullptr : std::shared_ptr<const Leaves>(std::move(beside));
    for (ResultHook* hook : followed_) hook->set_beside(told);
  }

 private:
  static std::vector<torch::autograd::Node*> inputs_of(const torch::autograd::Node& operation) {
    std::vector<torch::autograd::Node*> inputs;
    for (const auto& edge : operation.next_edges())
      if (edge.function) inputs.push_back(edge.function.get());
    return inputs;
  }
  static bool adds(const torch::autograd::Node& operation) {
    const std::string name = operation.name();
    for (const char* one : {"AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0"})
      if (name == one) return true;
    return false;
  }
  void expand(torch::autograd::Node* operation) {
    while (operation != nullptr && seen_.insert(operation).second) {
      if (ResultHook* const hook = ResultHook::on(*operation)) {
        followed_.push_back(hook);
        return;
      }
      const auto inputs = inputs_of(*operation);
      if (inputs.size() != 1) {
        if (inputs.empty() || !adds(*operation)) return others_.push_back(operation);
        for (torch::autograd::Node* input : inputs) expand(input);
        return;
      }
      operation = inputs.front();
    }
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

  std::vector<ResultHook*> followed_;
  std::vector<torch::autograd::Node*> others_;
  std::unordered_set<torch::autograd::Node*> seen_;
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
  constexpr size_t kMost = 64;
  std::vector<torch::autograd::Node*> operations;
  if (const auto last = tensor.grad_fn()) operations.push_back(&*last);  // which the tensor keeps
  for (size_t i = 0; i < operations.size(); ++i) {
    if (ResultHook::on(*operations[i]) != nullptr) return true;
    for (const auto& edge : operations[i]->next_edges()) {
      if (operations.size() == kMost) break;
      if (edge.function && std::find(operations.begin(), operations.end(), &*edge.function) == operations.end())
        operations.push_back(&*edge.function);
    }
  }
  return false;
}

}  // namespace lockstep
