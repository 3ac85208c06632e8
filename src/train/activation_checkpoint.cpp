#include <lockstep/activation_checkpoint.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/autograd.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <lockstep/autocast.h>

#include "reducer/gradient_hook.h"
#include "reducer/whole_backward.h"

namespace lockstep::detail {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The states of random number generators.
class RandomStates {
 public:
  explicit RandomStates(const std::vector<c10::Device>& devices) {
    for (const c10::Device& device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::scoped_lock lock(generator.mutex());
      states_.emplace_back(generator, generator.get_state());
    }
  }
  void set() const {
    for (const auto& [of, state] : states_) {
      at::Generator generator = of;
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& inputs) {
  std::vector<c10::Device> devices{at::kCPU};
  for (const at::Tensor& input : inputs)
    if (input.defined() && std::find(devices.begin(), devices.end(), input.device()) == devices.end())
      devices.push_back(input.device());
  return devices;
}

/// What makes a second call compute what the first one has computed.
class Surroundings {
 public:
  explicit Surroundings(const std::vector<at::Tensor>& inputs) : devices_(devices_of(inputs)), random_(devices_) {
    for (const c10::Device& device : devices_)
      if (at::autocast::is_autocast_available(device.type()))
        casts_.push_back({.device = device.type(),
                          .dtype = at::autocast::get_autocast_dtype(device.type()),
                          .enabled = at::autocast::is_autocast_enabled(device.type()),
                          .cache_enabled = at::autocast::is_autocast_cache_enabled()});
  }

  class Guard {
   public:
    explicit Guard(const Surroundings& as) : before_(as.devices_) {
      as.random_.set();
      for (const AutocastOptions& cast : as.casts_) casts_.emplace_back(cast);
    }
    ~Guard() { before_.set(); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const RandomStates before_;
    std::deque<AutocastGuard> casts_;
  };

 private:
  const std::vector<c10::Device> devices_;
  const RandomStates random_;
  std::vector<AutocastOptions> casts_;
};

/// The first call's casts of weights have no graph, so that the rest of the forward must not find them.
class WithoutCastCache {
 public:
  WithoutCastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~WithoutCastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  WithoutCastCache(const WithoutCastCache&) = delete;
  WithoutCastCache& operator=(const WithoutCastCache&) = delete;

 private:
  const bool before_ = at::autocast::is_autocast_cache_enabled();
};

/// What must not change between the calls, of all modules.
struct ModuleMarks {
  explicit ModuleMarks(const Modules& modules) {
    for (const auto& top : modules) {
      for (const auto& module : top->modules()) training.push_back(module->is_training());
      for (const auto& item : top->named_parameters()) versions.push_back(item.value()._version());
    }
  }
  std::vector<bool> training;
  std::vector<int64_t> versions;
};

void check_unchanged(const Modules& modules, const ModuleMarks& before) {
  const ModuleMarks now(modules);
  TORCH_CHECK(now.training == before.training && now.versions.size() == before.versions.size(),
              "checkpoint(): the module was switched between train() and eval(), or given other layers, after the call "
              "whose backward this is, so the second call would compute something else; run backward first");
  size_t number = 0;
  for (const auto& top : modules)
    for (const auto& item : top->named_parameters()) {
      TORCH_CHECK(now.versions[number] == before.versions[number], "checkpoint(): parameter ", item.key(),
                  " was changed after the call whose backward this is, as optimizer.step() does, so its activations "
                  "cannot be computed again; run backward first");
      ++number;
    }
}

/// Buffers are changed by the first call alone.
class KeptBuffers {
 public:
  explicit KeptBuffers(const Modules& modules) {
    for (const auto& module : modules)
      if (module->is_training())
        for (const at::Tensor& buffer : module->buffers()) before_.emplace_back(buffer, buffer.detach().clone());
  }
  ~KeptBuffers() {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, before] : before_) buffer.copy_(before);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

/// A call that is made again.
struct Call : torch::CustomClassHolder {
  Call(Segment the_segment, Modules the_modules, const std::vector<at::Tensor>& inputs)
      : segment(std::move(the_segment)), modules(std::move(the_modules)), surroundings(inputs), marks(modules) {
    for (const at::Tensor& input : inputs) defined.push_back(input.defined());
  }
  /// Those among the inputs are undefined again that were.
  variable_list all_inputs(const variable_list& defined_ones) const {
    variable_list all;
    auto next = defined_ones.begin();
    for (const bool is_there : defined) all.push_back(is_there ? *next++ : at::Tensor());
    return all;
  }
  /// Of what the first call has returned.
  static std::string description(const std::vector<at::Tensor>& outputs) {
    std::string text;
    for (const at::Tensor& output : outputs)
      text += (text.empty() ? "" : ", ") +
              (output.defined() ? c10::str(c10::toString(output.scalar_type()), ' ', output.sizes()) : "undefined");
    return text;
  }

  const Segment segment;
  const Modules modules;
  const Surroundings surroundings;
  const ModuleMarks marks;
  std::vector<bool> defined;  ///< which of the inputs are; autograd takes no others
  std::string returned;
};

class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                               const at::Tensor& /*in_graph*/, at::TensorList inputs) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    const WithoutCastCache without_cache;
    variable_list outputs = call->segment(call->all_inputs(inputs.vec()));
    call->returned = Call::description(outputs);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TORCH_CHECK(gradients_go_to_all_leaves(),
                "checkpoint(): autograd::grad() and backward(inputs), which ask for some gradients only, do not go "
                "through a checkpointed call, which computes them all; call backward() without inputs");
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "checkpoint(): backward(create_graph) does not go through a checkpointed call; do without checkpoint() "
                "where gradients of gradients are needed");
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    check_unchanged(call->modules, call->marks);
    const variable_list saved = context->get_saved_variables();
    variable_list inputs;
    for (const at::Tensor& input : saved) inputs.push_back(input.detach().set_requires_grad(input.requires_grad()));
    run_again(*call, inputs, gradients);
    variable_list result(2);
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }

 private:
  static void run_again(const Call& call, const variable_list& inputs, const variable_list& gradients) {
    const KeptBuffers buffers(call.modules);
    variable_list outputs;
    {
      const at::AutoGradMode with_graph(true);
      const Surroundings::Guard guard(call.surroundings);
      outputs = call.segment(call.all_inputs(inputs));
    }
    const std::string returned = Call::description(outputs);
    TORCH_CHECK(returned == call.returned, "checkpoint(): the second call, in backward, returned ", returned,
                ", and the first ", call.returned, "; the function must compute the same from the same inputs");
    variable_list roots, given;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      given.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, given);
  }
};

}  // namespace

std::vector<at::Tensor> checkpointed(Segment segment, std::vector<at::Tensor> inputs, Modules modules) {
  for (const auto& module : modules) TORCH_CHECK(module != nullptr, "checkpoint(): the module is empty");
  auto call = c10::make_intrusive<Call>(std::move(segment), std::move(modules), inputs);
  std::erase_if(inputs, [](const at::Tensor& one) { return !one.defined(); });
  const bool in_graph =
      std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& one) { return one.requires_grad(); });
  // Autograd follows a function by its inputs; what the function itself reads is not among them.
  const at::Tensor leaf = at::empty({0}).set_requires_grad(!in_graph);
  watch_engine();
  variable_list outputs = Checkpoint::apply(call, leaf, at::TensorList(inputs));
  for (const at::Tensor& output : outputs) needs_whole_backward(output);
  return outputs;
}

}  // namespace lockstep::detail

namespace lockstep {

at::Tensor checkpoint_sequential(const torch::nn::Sequential& layers, int segments, const at::Tensor& input) {
  TORCH_CHECK(!layers.is_empty(), "checkpoint_sequential(): the sequence is empty; construct it first");
  const auto count = static_cast<int>(layers->size());
  TORCH_CHECK(segments >= 1 && segments <= count, "checkpoint_sequential(): ", segments, " segments of ", count,
              " layers; from 1 to that");
  const auto run = [](std::vector<torch::nn::AnyModule>& part, at::Tensor x) {
    for (torch::nn::AnyModule& layer : part) x = layer.forward(x);
    return x;
  };
  at::Tensor x = input;
  for (int segment = 0; segment < segments; ++segment) {
    const auto at = [&](int number) { return layers->begin() + static_cast<int64_t>(count) * number / segments; };
    std::vector<torch::nn::AnyModule> part(at(segment), at(segment + 1));
    if (segment + 1 == segments || !at::GradMode::is_enabled()) {
      x = run(part, x);
      continue;
    }
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    for (const torch::nn::AnyModule& layer : part) modules.push_back(layer.ptr());
    x = detail::checkpointed(
            [part, run](const std::vector<at::Tensor>& given) mutable { return std::vector{run(part, given.front())}; },
            {x}, modules)
            .front();
  }
  return x;
}

}  // namespace lockstep
