#include "reducer/whole_backward.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace lockstep {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Marks an operation.
class WholeBackward final : public torch::autograd::FunctionPreHook {
 public:
  WholeBackward() { ++alive_; }
  ~WholeBackward() override { --alive_; }
  WholeBackward(const WholeBackward&) = delete;
  variable_list operator()(const variable_list& gradients) override { return gradients; }

  static bool any() { return alive_.load(std::memory_order_relaxed) > 0; }
  static bool marks(const Node& operation) {
    const auto& hooks = operation.pre_hooks();
    return std::any_of(hooks.begin(), hooks.end(),
                       [](const auto& hook) { return dynamic_cast<const WholeBackward*>(hook.get()) != nullptr; });
  }

 private:
  inline static std::atomic<int> alive_{0};
};

/// Calls `visit` once for each operation from these to leaves, until it returns false.
template <typename Visit>
void walk(std::vector<const Node*> waiting, const Visit& visit) {
  std::unordered_set<const Node*> seen;
  while (!waiting.empty()) {
    const Node* const operation = waiting.back();
    waiting.pop_back();
    if (operation == nullptr || !seen.insert(operation).second) continue;
    if (!visit(*operation)) return;
    for (const auto& edge : operation->next_edges()) waiting.push_back(edge.function.get());
  }
}

}  // namespace

void needs_whole_backward(const at::Tensor& result) {
  if (const auto operation = result.grad_fn(); operation && !WholeBackward::marks(*operation))
    operation->add_pre_hook(std::make_unique<WholeBackward>());
}

bool runs_backward_itself(const Node& operation) { return WholeBackward::any() && WholeBackward::marks(operation); }

void check_whole_backward(const std::vector<torch::autograd::Edge>& roots,
                          const std::vector<torch::autograd::Edge>& asked) {
  if (asked.empty() || !WholeBackward::any()) return;
  std::vector<const Node*> begin;
  for (const auto& root : roots) begin.push_back(root.function.get());
  std::unordered_set<const Node*> reached;
  bool any = false;
  walk(std::move(begin), [&](const Node& operation) {
    reached.insert(&operation);
    any = any || WholeBackward::marks(operation);
    return true;
  });
  const auto is_reached = [&](const auto& edge) { return !edge.function || reached.contains(edge.function.get()); };
  TORCH_CHECK(
      !any || std::all_of(asked.begin(), asked.end(), is_reached),
      "checkpoint(): autograd::grad() and backward(inputs), which ask for some gradients only, ask for one that no "
      "way leads to but through a checkpointed call, which computes all or none; call backward() without inputs");
}

bool reaches_older(const std::vector<at::Tensor>& results, uint64_t number) {
  const uint64_t here = at::RecordFunction::currentThreadId();  // numbers are per thread
  std::vector<const Node*> begin;
  for (const at::Tensor& result : results) begin.push_back(result.grad_fn().get());
  bool any = false;
  walk(std::move(begin), [&](const Node& operation) {
    const bool is_leaf = operation.sequence_nr() == std::numeric_limits<uint64_t>::max();
    any = !is_leaf && (operation.sequence_nr() < number || operation.thread_id() != here);
    return !any;
  });
  return any;
}

}  // namespace lockstep
