#include "reducer/gradient_hook.h"

#include <algorithm>
#include <memory>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace lockstep {
namespace {

using torch::autograd::variable_list;

class AfterAccumulation final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterAccumulation(std::function<void()> accumulated) : accumulated_(std::move(accumulated)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    accumulated_();
    return outputs;
  }

 private:
  /// A copy: with a thousand small parameters each further place in memory is a miss in the caches.
  const std::function<void()> accumulated_;
};

/// Waits among the final callbacks of a backward, which live as long as it does. A nested backward knows nothing of the
/// one that called it; but when its memory is released, control is back in the outer one, whose end can be asked for.
class Waiting : public std::enable_shared_from_this<Waiting> {
 public:
  explicit Waiting(EndOfBackward end) : end_(std::move(end)) {}
  ~Waiting() {
    if (state_ == State::kNested && current_backward() != -1)
      std::make_shared<Waiting>(std::move(end_))->queue();
    else if (state_ != State::kDone)
      end_.abandoned();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  void queue() {
    at_end_of_backward([self = shared_from_this()](bool nested) {
      self->state_ = nested ? State::kNested : State::kDone;
      nested ? self->end_.nested() : self->end_.finished();
    });
  }

 private:
  enum class State { kWaiting, kNested, kDone };

  EndOfBackward end_;
  State state_ = State::kWaiting;
};

/// Whether the backward running on this thread hands the gradient of this node to its caller instead of .grad.
template <typename NodePointer>
bool is_captured(const NodePointer& accumulator) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return false;  // the usual backward: everything, into .grad
  const auto found = chosen->find(&*accumulator);
  return found != chosen->end() && found->second.captures_ != nullptr;
}

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, GradientEvents events)
    : parameter_(parameter), events_(std::move(events)) {
  TORCH_CHECK(parameter.requires_grad() && parameter.is_leaf(),
              "gradients can be followed only for leaf tensors that "
              "require grad");
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter);
  accumulated_key_ = accumulator_->add_post_hook(std::make_unique<AfterAccumulation>(events_.accumulated));
  if (events_.before)
    arriving_key_ = parameter.register_hook(
        [this](const at::TensorBase&) { is_captured(accumulator_) ? events_.captured() : events_.before(); });
  else
    arriving_key_ = parameter.register_hook([this](const at::TensorBase&) {
      if (is_captured(accumulator_)) events_.captured();
    });
}

GradientHook::~GradientHook() {
  parameter_.remove_hook(arriving_key_);
  accumulator_->del_post_hook(accumulated_key_);
}

bool GradientHook::follows(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const AfterAccumulation*>(hook.get()) != nullptr; });
}

void at_end_of_backward(std::function<void(bool nested)> function) {
  torch::autograd::Engine::get_default_engine().queue_callback([function = std::move(function)] {
    // When a backward ends no node is being evaluated on this thread, unless that node called the backward.
    function(/*nested=*/static_cast<bool>(torch::autograd::get_current_node()));
  });
}

void at_end_of_outermost_backward(EndOfBackward end) { std::make_shared<Waiting>(std::move(end))->queue(); }

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace lockstep
