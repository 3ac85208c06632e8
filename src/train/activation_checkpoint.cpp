#include <lockstep/activation_checkpoint.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/autograd.h>
#include <torch/custom_class.h>
#include <torch/nn/module.h>

#include <lockstep/autocast.h>

#include "reducer/gradient_hook.h"
#include "reducer/whole_backward.h"
#include "train/first_call.h"
#include "train/in_checkpoint.h"

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

/// The surroundings that make the second call compute the same as the first.
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

/// The first call's casts of weights have no graph, so the rest of the forward must not find them.
class WithoutCastCache {
 public:
  WithoutCastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~WithoutCastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  WithoutCastCache(const WithoutCastCache&) = delete;
  WithoutCastCache& operator=(const WithoutCastCache&) = delete;

 private:
  const bool before_ = at::autocast::is_autocast_cache_enabled();
};

/// A call that is repeated in backward.
struct Call : torch::CustomClassHolder {
  Call(Segment the_segment, Modules the_modules, const std::vector<at::Tensor>& inputs)
      : segment(std::move(the_segment)),
        modules(std::move(the_modules)),
        surroundings(inputs),
        marks(modules),
        buffers(modules) {
    for (const at::Tensor& input : inputs) defined.push_back(input.defined());
  }
  /// All inputs, with undefined ones undefined again.
  variable_list all_inputs(const variable_list& defined_ones) const {
    variable_list all;
    auto next = defined_ones.begin();
    for (const bool is_there : defined) all.push_back(is_there ? *next++ : at::Tensor());
    return all;
  }
  /// Describes the results of the first call.
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
  FirstBuffers buffers;
  std::vector<bool> defined;  ///< which inputs are defined; autograd takes no others
  std::vector<bool> returned_defined;
  std::string returned;
  std::optional<SomeValues> values;
};

class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                               const at::Tensor& /*in_graph*/, at::TensorList inputs) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    const variable_list given = inputs.vec();
    const std::vector<int64_t> before = versions_of(given);
    variable_list outputs = first_call(*call, given);
    TORCH_CHECK(versions_of(given) == before,
                "checkpoint(): the function changes an input in place, so the second call, in backward, would get a "
                "different input; let it compute a new tensor, or clone() the input first");
    call->returned = Call::description(outputs);
    call->values.emplace(outputs);
    std::erase_if(outputs, [](const at::Tensor& output) { return !output.defined(); });
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TORCH_CHECK(gradients_go_to_all_leaves(),
                "checkpoint(): autograd::grad() and backward(inputs) ask for some gradients only, and cannot go "
                "through a checkpointed call, which computes all of them; call backward() without inputs");
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "checkpoint(): backward(create_graph) cannot go through a checkpointed call; do not use checkpoint() "
                "if you need gradients of gradients");
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    call->marks.check_unchanged(call->modules);
    call->buffers.check_unchanged();
    const variable_list saved = context->get_saved_variables();
    variable_list inputs;
    for (const at::Tensor& input : saved) inputs.push_back(input.detach().set_requires_grad(input.requires_grad()));
    run_again(*call, inputs, gradients);
    variable_list result(2);
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }

 private:
  static std::vector<int64_t> versions_of(const variable_list& inputs) {
    std::vector<int64_t> versions;
    for (const at::Tensor& input : inputs) versions.push_back(input._version());
    return versions;
  }
  static variable_list first_call(Call& call, const variable_list& inputs) {
    const WithoutCastCache without_cache;
    const InCheckpoint in_checkpoint;
    variable_list outputs = call.segment(call.all_inputs(inputs));
    call.buffers.drop_unchanged();
    for (const at::Tensor& output : outputs) call.returned_defined.push_back(output.defined());
    return outputs;
  }
  static void run_again(const Call& call, const variable_list& inputs, const variable_list& gradients) {
    const FirstBuffers::Guard buffers(call.buffers);
    const uint64_t begin = at::sequence_number::peek();
    variable_list outputs;
    {
      const at::AutoGradMode with_graph(true);
      const Surroundings::Guard guard(call.surroundings);
      const InCheckpoint in_checkpoint;
      outputs = call.segment(call.all_inputs(inputs));
    }
    const std::string returned = Call::description(outputs);
    TORCH_CHECK(returned == call.returned, "checkpoint(): the second call, in backward, returned ", returned,
                ", and the first ", call.returned, "; the function must compute the same from the same inputs");
    const int64_t other = call.values->first_other(SomeValues(outputs));
    TORCH_CHECK(other == -1,
                "checkpoint(): the second call, in backward, returned other values than the first, in tensor ", other,
                " of ", outputs.size(),
                ", so its gradients would be wrong. Everything that the function reads, such as weights, train() or "
                "eval() and random numbers that are not torch's, must stay the same until backward");
    std::erase_if(outputs, [](const at::Tensor& output) { return !output.defined(); });
    variable_list roots, given;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      given.push_back(gradients[i]);
    }
    // Others may also go through the outer graph that the function has read.
    if (!roots.empty()) torch::autograd::backward(roots, given, /*retain_graph=*/reaches_older(roots, begin));
  }
};

}  // namespace

std::vector<at::Tensor> checkpointed(Segment segment, std::vector<at::Tensor> inputs, Modules modules) {
  for (const auto& module : modules) TORCH_CHECK(module != nullptr, "checkpoint(): the module is empty");
  const auto in_graph = [](const at::Tensor& one) { return one.defined() && one.requires_grad(); };
  const bool any_input = std::any_of(inputs.begin(), inputs.end(), in_graph);
  const auto trains = [&](const auto& module) {
    const std::vector<at::Tensor> parameters = module->parameters();
    return std::any_of(parameters.begin(), parameters.end(), in_graph);
  };
  if (!any_input && !modules.empty() && std::none_of(modules.begin(), modules.end(), trains)) return segment(inputs);
  auto call = c10::make_intrusive<Call>(std::move(segment), std::move(modules), inputs);
  std::erase_if(inputs, [](const at::Tensor& one) { return !one.defined(); });
  // Autograd follows a function by its inputs, which do not include the tensors that the function itself reads.
  const at::Tensor leaf = at::empty({0}).set_requires_grad(!any_input);
  watch_engine();
  const variable_list defined = Checkpoint::apply(call, leaf, at::TensorList(inputs));
  variable_list outputs;
  auto next = defined.begin();
  for (const bool is_there : call->returned_defined) {
    outputs.push_back(is_there ? *next++ : at::Tensor());
    if (is_there) needs_whole_backward(outputs.back());
  }
  return outputs;
}

}  // namespace lockstep::detail

namespace lockstep {

at::Tensor checkpoint_sequential(const torch::nn::Sequential& layers, int segments, const at::Tensor& input) {
  TORCH_CHECK(!layers.is_empty(), "checkpoint_sequential(): the sequence is empty; construct it first");
  const auto count = static_cast<int>(layers->size());
  TORCH_CHECK(segments >= 1 && segments <= count, "checkpoint_sequential(): ", segments, " segments of ", count,
              " layers; give 1 to that number");
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
