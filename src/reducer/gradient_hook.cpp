#include "reducer/gradient_hook.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "base/mutex.h"
#include "reducer/followed_result.h"
#include "reducer/whole_backward.h"

namespace lockstep {
namespace {

using torch::autograd::variable_list;

std::atomic<void (*)(const std::exception& error)> translation{nullptr};
std::atomic<bool (*)(const at::Tensor& tensor)> unused_wrapper{nullptr};
std::atomic<void (*)()> restore_later{nullptr};

template <typename Function>
void translating(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    if (auto* translate = translation.load()) translate(error);
    throw;
  } catch (const c10::Error& error) {
    if (auto* translate = translation.load()) translate(error);
    throw;
  }
}

/// The list of a tensor's hooks in C++, and the hook that runs them.
struct ListedHooks {
  std::shared_ptr<torch::autograd::hooks_list> list;
  std::unique_ptr<torch::autograd::FunctionPreHook> runner;
};

/// Calls a function before a gradient is accumulated, with whether there is one, and another, if given, when something
/// other than remove_hook() removes this hook from the tensor. Before that, it runs `listed`, if given. While that list
/// is empty, the tensor has one hook instead of two, which counts with a thousand small parameters.
class BeforeAccumulation final : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulation(std::function<void(bool any)> arriving, std::function<void()> dropped, ListedHooks listed)
      : arriving_(std::move(arriving)), listed_(std::move(listed)), dropped_(std::move(dropped)) {}
  ~BeforeAccumulation() override {
    if (dropped_) dropped_();
  }
  BeforeAccumulation(const BeforeAccumulation&) = delete;
  /// Forgets `dropped`. Returns the runner of the listed hooks; null if another hook is the runner.
  std::unique_ptr<torch::autograd::FunctionPreHook> take_apart() {
    dropped_ = nullptr;
    return std::move(listed_.runner);
  }
  /// Compiled autograd asks the first hook that it meets to be compiled.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*of*/) const override {
    translating([] { TORCH_CHECK(false, kCompiledAutograd); });
  }
  variable_list operator()(const variable_list& gradients) override {
    if (!listed_.list || listed_.list->empty()) {
      tell(gradients);
      return gradients;
    }
    variable_list theirs = (*listed_.runner)(gradients);
    tell(theirs);
    return theirs;
  }

 private:
  void tell(const variable_list& gradients) const {
    translating([&] { arriving_(!gradients.empty() && gradients.front().defined()); });
  }

  const std::function<void(bool any)> arriving_;
  ListedHooks listed_;
  std::function<void()> dropped_;
};

/// Adds a hook to a tensor's own, in C++ and in Python. Tensor::register_hook() drops Python's hooks when it makes the
/// list for those of C++, so that list is made here, next to them; then it drops none, including this one.
torch::autograd::FunctionPreHook* add_hook(const at::Tensor& tensor, std::function<void(bool any)> arriving,
                                           std::function<void()> dropped = nullptr) {
  auto* meta = torch::autograd::impl::materialize_autograd_meta(tensor);
  ListedHooks listed;
  if (!meta->cpp_hooks_list_) {
    auto kept = std::exchange(meta->hooks_, {});
    torch::autograd::impl::create_cpp_hook(tensor);
    listed = {meta->cpp_hooks_list_, std::move(meta->hooks_.back())};
    meta->hooks_ = std::move(kept);
  }
  meta->hooks_.push_back(
      std::make_unique<BeforeAccumulation>(std::move(arriving), std::move(dropped), std::move(listed)));
  return meta->hooks_.back().get();
}

void remove_hook(const at::Tensor& tensor, const torch::autograd::FunctionPreHook* hook) {
  auto& all = torch::autograd::impl::hooks(tensor);
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.get() == hook; });
  auto* const own = found == all.end() ? nullptr : dynamic_cast<BeforeAccumulation*>(found->get());
  if (own == nullptr) return;
  if (auto runner = own->take_apart())
    *found = std::move(runner);
  else
    all.erase(found);
}

class AfterAccumulation final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterAccumulation(std::function<void(bool any)> accumulated) : accumulated_(std::move(accumulated)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    translating([&] { accumulated_(!gradients.empty() && gradients.front().defined()); });
    return outputs;
  }

 private:
  /// A copy, because with a thousand small parameters every additional memory location is a cache miss.
  const std::function<void(bool any)> accumulated_;
};

class AfterAlarm final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AfterAlarm(std::function<void()> accumulated) : accumulated_(std::move(accumulated)) {}
  void operator()(const torch::autograd::Variable& /*leaf*/) override {
    translating([&] { accumulated_(); });
  }

 private:
  const std::function<void()> accumulated_;
};

/// Held by the final callbacks of a backward, which live as long as it does. A nested backward does not know the outer
/// one; but when the nested one's callbacks are destroyed, control is back in the outer one, and this object queues
/// itself there.
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

/// Whether the backward running on this thread returns the gradient of this node to its caller instead of accumulating
/// it into .grad. `chosen` are the nodes that the backward was asked for.
template <typename Chosen, typename NodePointer>
bool is_captured(const Chosen* chosen, const NodePointer& accumulator) {
  if (chosen == nullptr || chosen->empty() || !accumulator) return false;
  const auto found = chosen->find(&*accumulator);
  return found != chosen->end() && found->second.captures_ != nullptr;
}

/// Whether `weak` refers to the node that `held` keeps alive. Compares addresses, because a lock would cost two atomic
/// operations for each gradient.
template <typename Weak, typename NodePointer>
bool refers_to(const Weak& weak, const NodePointer& held) {
  if constexpr (requires { weak._unsafe_get_target(); })
    return weak._unsafe_get_target() == held.get();
  else
    return !weak.owner_before(held) && !held.owner_before(weak);
}

/// The tensors that GradientHooks follow, and how many hooks follow each: two while a refresh() is running.
class Followed {
 public:
  void add(const at::Tensor& tensor) {
    const MutexLock lock(mutex_);
    ++hooks_[tensor.unsafeGetTensorImpl()];
  }
  void remove(const at::Tensor& tensor) {
    const MutexLock lock(mutex_);
    const auto found = hooks_.find(tensor.unsafeGetTensorImpl());
    if (--found->second == 0) hooks_.erase(found);
  }
  bool contains(const at::Tensor& tensor) {
    const MutexLock lock(mutex_);
    return hooks_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  Mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, int> hooks_ LOCKSTEP_GUARDED_BY(mutex_);
};

/// Never destroyed, because the program's static destructors may still use it.
Followed& followed() {
  static auto* const kFollowed = new Followed;
  return *kFollowed;
}

/// GradientHooks whose hook on the tensor was dropped.
struct Dropped {
  Mutex mutex;
  std::vector<GradientHook*> list LOCKSTEP_GUARDED_BY(mutex);
};

Dropped& dropped() {
  static auto* const kDropped = new Dropped;
  return *kDropped;
}

/// Wraps the process's autograd engine to see every backward; hooks on tensors do not see one that goes through other
/// tensors. The original engine does all the work.
class WatchedEngine final : public torch::autograd::Engine {
 public:
  static void install() {
    instance_ = new WatchedEngine(get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *instance_; });
  }

  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    if (!torch::autograd::get_current_node()) BackwardWatch::begin();
    tell_followed_results(roots);
    check_whole_backward(roots, outputs);
    return engine_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    engine_.initialize_device_threads_pool();
    return engine_.execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return engine_.get_default_saved_variable_hooks();
  }

 private:
  explicit WatchedEngine(Engine& engine) : engine_(engine) {}

  inline static WatchedEngine* instance_ = nullptr;  ///< never destroyed: autograd may be used until the end
  Engine& engine_;
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, GradientEvents events)
    : parameter_(parameter), events_(std::move(events)) {
  TORCH_CHECK(parameter.requires_grad() && parameter.is_leaf(),
              "gradients can be followed only for leaf tensors that require grad");
  accumulator_.node = torch::autograd::impl::grad_accumulator(parameter);
  accumulator_.key = accumulator_.node->add_post_hook(std::make_unique<AfterAccumulation>(events_.accumulated));
  put_on_tensor();
  followed().add(parameter);
}

GradientHook::~GradientHook() {
  followed().remove(parameter_);
  {
    Dropped& all = dropped();
    const MutexLock lock(all.mutex);
    std::erase(all.list, this);
  }
  if (arriving_hook_ != nullptr) remove_hook(parameter_, arriving_hook_);
  accumulator_.node->del_post_hook(accumulator_.key);
  for (const Accumulator& one : earlier_) one.node->del_post_hook(one.key);
}

void GradientHook::look_for_another_node() {
  auto now = torch::autograd::impl::try_get_grad_accumulator(parameter_);
  if (!now || now == accumulator_.node) return;
  // The engine looks up a node's post hooks only after its pre-hooks have run, so this one is still called.
  const uintptr_t key = now->add_post_hook(std::make_unique<AfterAccumulation>(events_.accumulated));
  earlier_.push_back(std::exchange(accumulator_, {std::move(now), key}));
}

void GradientHook::arriving(bool any) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(parameter_);
  if (meta == nullptr || !refers_to(meta->grad_accumulator_, accumulator_.node)) look_for_another_node();
  if (is_captured())
    events_.captured();
  else if (events_.before && any)
    events_.before();
}

bool GradientHook::is_captured() const {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return false;  // the usual case: everything goes into .grad
  return lockstep::is_captured(chosen, accumulator_.node) ||
         std::any_of(earlier_.begin(), earlier_.end(),
                     [&](const Accumulator& one) { return lockstep::is_captured(chosen, one.node); });
}

void GradientHook::put_on_tensor() {
  const auto note_drop = [this] {
    arriving_hook_ = nullptr;
    {
      Dropped& all = dropped();
      const MutexLock lock(all.mutex);
      all.list.push_back(this);
    }
    if (auto* later = restore_later.load()) later();
  };
  arriving_hook_ = add_hook(
      parameter_, [this](bool any) { arriving(any); }, note_drop);
}

void GradientHook::restore_dropped() {
  Dropped& all = dropped();
  const MutexLock lock(all.mutex);
  for (GradientHook* hook : std::exchange(all.list, {})) hook->put_on_tensor();
}

bool GradientHook::follows(const at::Tensor& parameter) { return followed().contains(parameter); }

bool GradientHook::is_reduced_by_c10d(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  // Nothing else in LibTorch puts this kind of hook on such a node.
  return node && std::any_of(node->post_hooks().begin(), node->post_hooks().end(), [](const auto& hook) {
           return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
         });
}

GradientAlarm::GradientAlarm(const at::Tensor& leaf, std::function<void()> arriving, std::function<void()> accumulated)
    : leaf_(leaf) {
  const bool requires_grad = leaf.requires_grad();
  if (!requires_grad && (leaf.is_inference() || !(leaf.is_floating_point() || leaf.is_complex()))) return;
  // A tensor keeps its hooks whether or not it requires grad, but accepts new ones only while it does.
  if (!requires_grad) leaf.set_requires_grad(true);
  const auto alarm = [this, arriving = std::move(arriving)](bool) {
    if (!GradientHook::follows(leaf_) && !is_captured(torch::autograd::get_current_graph_task_exec_info(),
                                                      torch::autograd::impl::try_get_grad_accumulator(leaf_)))
      arriving();
  };
  hook_ = add_hook(leaf, alarm, [this] { hook_ = nullptr; });
  if (accumulated) {
    auto after = std::make_unique<AfterAlarm>(std::move(accumulated));
    accumulated_ = after.get();
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(after));
  }
  if (!requires_grad) leaf.set_requires_grad(false);
}

GradientAlarm::~GradientAlarm() {
  if (hook_ != nullptr) remove_hook(leaf_, hook_);
  if (accumulated_ == nullptr) return;
  auto& after = torch::autograd::impl::post_acc_grad_hooks(leaf_);
  if (after.get() == accumulated_) after.reset();
}

void watch_engine() { [[maybe_unused]] static const bool installed = (WatchedEngine::install(), true); }

void at_end_of_backward(std::function<void(bool nested)> function) {
  torch::autograd::Engine::get_default_engine().queue_callback([function = std::move(function)] {
    // When a backward ends, no node is being evaluated on this thread, unless that node called the backward.
    translating([&] { function(/*nested=*/static_cast<bool>(torch::autograd::get_current_node())); });
  });
}

void at_end_of_outermost_backward(EndOfBackward end) { std::make_shared<Waiting>(std::move(end))->queue(); }

void translate_errors_of_backward(void (*translate)(const std::exception& error)) { translation = translate; }

void tell_dropped_hooks(void (*later)()) { restore_later = later; }

bool is_held_elsewhere(const at::Tensor& tensor) {
  const size_t handles = tensor.use_count();
  if (handles != 2) return handles != 1;
  const auto is_unused = unused_wrapper.load(std::memory_order_relaxed);
  return is_unused == nullptr || !is_unused(tensor);
}

void tell_unused_wrappers(bool (*is_unused)(const at::Tensor& tensor)) { unused_wrapper = is_unused; }

bool gradients_go_to_all_leaves() { return torch::autograd::Engine::get_base_engine().is_checkpoint_valid(); }

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace lockstep
