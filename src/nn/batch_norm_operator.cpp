#include "nn/batch_norm_operator.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <torch/library.h>

#include "base/mutex.h"
#include "nn/batch_statistics.h"

// torch::nn::BatchNorm's forward is not virtual and is inlined into its callers, so a layer held by its own type can
// only be synchronised at a lower level. Every kind of batch norm (LibTorch's layers, the functional form, TorchScript
// as written: nn/scripted_layers.cpp) calls the operator aten::_batch_norm_impl_index, which is composed of other
// operators and so accepts a kernel for a device (torch/library.h). Ours checks whether its arguments belong to a
// synchronised layer, and otherwise behaves like the operator without it. Programs that convert nothing never register
// it.

namespace lockstep {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

/// The operator returns which implementation it used, for its own backward (torch's are 0 to 2), which refuses any
/// other value; our backward is an autograd function.
constexpr int64_t kSynchronized = 1000;

/// The weak pointer keeps the address of a destroyed tensor reserved, so no other tensor can be mistaken for it.
struct Entry {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  SynchronizedLayer layer;
};

struct Layers {
  Mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries LOCKSTEP_GUARDED_BY(mutex);
};

Layers& layers() {
  static auto* const all = new Layers;  // never destroyed: static destructors may still call the operator
  return *all;
}

std::optional<SynchronizedLayer> find(const OptionalTensor& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  Layers& all = layers();
  const MutexLock lock(all.mutex);
  const auto found = all.entries.find(tensor->unsafeGetTensorImpl());
  if (found == all.entries.end()) return std::nullopt;
  return found->second.layer;
}

/// TorchScript's optimizing executor passes detached tensors and differentiates by its own formula.
bool is_detached_from_layer(const OptionalTensor& tensor) {
  if (!tensor || !tensor->defined() || !tensor->has_storage()) return false;
  Layers& all = layers();
  const MutexLock lock(all.mutex);
  return std::any_of(all.entries.begin(), all.entries.end(), [&](const auto& item) {
    const Entry& entry = item.second;
    if (!entry.layer.is_training) return false;
    const auto impl = entry.tensor.lock();
    return impl && impl->has_storage() && impl->storage().is_alias_of(tensor->storage()) &&
           impl->storage_offset() == tensor->storage_offset() && impl->sizes() == tensor->sizes() &&
           entry.layer.is_training();
  });
}

/// The exchange of the layer in training that these tensors belong to, or null.
std::shared_ptr<LayerExchange> exchange_of(const OptionalTensor& running_mean, const OptionalTensor& weight) {
  auto layer = find(running_mean);
  if (!layer) layer = find(weight);
  TORCH_CHECK(layer || !(is_detached_from_layer(running_mean) || is_detached_from_layer(weight)),
              "forward in training of a synchronised batch norm with detached tensors, which would leave out the other "
              "ranks. In TorchScript this happens if a module ran before it was converted and was optimized to run "
              "alone: call convert_sync_batchnorm right after loading the module");
  if (!layer || !layer->is_training || !layer->is_training()) return nullptr;
  TORCH_CHECK(layer->exchange,
              "forward in training of a synchronised batch norm whose group is gone: its Context was "
              "destroyed; let the Context outlive the model");
  return layer->exchange;
}

ForwardResult forward(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  const auto exchange = training ? exchange_of(running_mean, weight) : nullptr;
  if (!exchange)
    return at::native::_batch_norm_impl_index(input, weight, bias, running_mean, running_var, training, momentum, eps,
                                              cudnn_enabled);
  const BatchNormArguments arguments{weight.value_or(at::Tensor()),
                                     bias.value_or(at::Tensor()),
                                     running_mean.value_or(at::Tensor()),
                                     running_var.value_or(at::Tensor()),
                                     momentum,
                                     eps};
  const auto wants_gradient = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  const at::Tensor none = at::empty({0}, input.options());
  if (at::GradMode::is_enabled() &&
      (wants_gradient(input) || wants_gradient(arguments.weight) || wants_gradient(arguments.bias)))
    return {sync_batch_norm(input, arguments, exchange), none, none, none, kSynchronized};
  const Normalized result = normalize(input, arguments, *exchange);
  return {result.output, result.statistics.mean, result.statistics.invstd,
          at::scalar_tensor(result.statistics.count, at::kDouble), kSynchronized};
}

void register_once() {
  static const bool registered = [] {
    // With gradients, before autograd records anything, and without (inference_mode).
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::CPU,
                           c10::DispatchKey::CUDA}) {
      auto* const library =
          new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // never unregistered
      library->impl("_batch_norm_impl_index", TORCH_FN(forward));
    }
    return true;
  }();
  (void)registered;
}

}  // namespace

void synchronize_calls_with(const at::Tensor& tensor, SynchronizedLayer layer) {
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(), "synchronised batch norm works on CPU and CUDA, not on ",
              tensor.device());
  register_once();
  Layers& all = layers();
  const MutexLock lock(all.mutex);
  std::erase_if(all.entries, [](const auto& entry) { return entry.second.tensor.expired(); });
  all.entries.insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), std::move(layer)});
}

std::shared_ptr<StatisticsExchange> exchange_within_join(const Group& group) {
  const auto own = StatisticsExchange::find(group);
  Layers& all = layers();
  const MutexLock lock(all.mutex);
  for (const auto& [address, entry] : all.entries)
    TORCH_CHECK(entry.tensor.expired() || entry.layer.exchange == nullptr || entry.layer.exchange->exchange == own,
                "join(): there is a synchronised batch norm over a group other than that of this "
                "DistributedDataParallel; a rank that has run out of inputs could not take part in its messages. "
                "Convert it over the group of the model");
  return own;
}

void forget_closed_groups() {
  Layers& all = layers();
  const MutexLock lock(all.mutex);
  for (auto& [address, entry] : all.entries)
    if (entry.layer.exchange && !entry.layer.exchange->exchange->group.is_open()) entry.layer.exchange = nullptr;
}

bool is_synchronized(const at::Tensor& tensor) { return find(tensor).has_value(); }

}  // namespace lockstep
