#include <algorithm>
#include <array>
#include <string_view>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>

#include "nn/found_layers.h"

// As long as its graph is interpreted as written, a scripted BatchNorm calls aten::_batch_norm_impl_index like any
// other (nn/batch_norm_operator.cpp). But TorchScript's executor profiles the first runs and then differentiates parts
// of the graph itself, without autograd: these get detached tensors, which identify no layer; on CUDA, batch norm may
// be replaced by other operators. The parts, and the order of layers on independent branches, depend on the shapes that
// a rank has seen, so ranks with uneven batches could even disagree about the order of their messages. Hence
// run_as_written().

namespace lockstep {
namespace {

/// `BatchNorm2d` for __torch__.torch.nn.modules.batchnorm.___torch_mangle_3.BatchNorm2d; empty if it is not torch's.
std::string kind_of_layer(const torch::jit::Module& module) {
  const c10::QualifiedName name = *module.type()->name();
  std::string path;
  for (const std::string& atom : name.atoms())
    if (atom.find("__torch_mangle_") == std::string::npos) path += atom + ".";
  for (const char* kind : {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d"})
    if (path == std::string("__torch__.torch.nn.modules.batchnorm.") + kind + ".") return kind;
  return "";
}

bool is_batch_norm(const torch::jit::Node& node) {
  const std::string_view kind = node.kind().toQualString();
  constexpr std::array<std::string_view, 4> kOperators{"aten::batch_norm", "aten::_batch_norm_impl_index",
                                                       "aten::native_batch_norm", "aten::_native_batch_norm_legit"};
  return std::find(kOperators.begin(), kOperators.end(), kind) != kOperators.end();
}

/// Calls `see` for each node of the block and of the functions (but not submodules) that it calls.
template <typename See>
void walk(const torch::jit::Block& block, const See& see) {
  for (const torch::jit::Node* node : block.nodes()) {
    see(*node);
    for (const torch::jit::Block* inner : node->blocks()) walk(*inner, see);
    if (node->kind() != c10::prim::CallFunction) continue;
    const auto type = node->input(0)->type()->cast<c10::FunctionType>();
    const auto* function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr;
    if (function != nullptr) walk(*function->graph()->block(), see);
  }
}

template <typename See>
void walk_methods(const torch::jit::Module& module, const See& see) {
  for (torch::jit::Function* method : module.type()->methods())
    if (const auto* function = torch::jit::tryToGraphFunction(*method)) walk(*function->graph()->block(), see);
}

/// A trace stores as a constant whether the layer was in training.
bool traced_in_eval(const torch::jit::Module& layer) {
  bool constant = false;
  walk_methods(layer, [&](const torch::jit::Node& node) {
    if (node.kind() != c10::aten::batch_norm) return;
    const torch::jit::Node& training = *node.input(5)->node();
    constant |= training.kind() == c10::prim::Constant && training.i(c10::attr::value) == 0;
  });
  return constant;
}

at::Tensor tensor_of(const torch::jit::Module& layer, const std::string& name) {
  if (!layer.hasattr(name)) return {};
  const c10::IValue value = layer.attr(name);
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

void look_at(FoundLayers& found, const std::string& name, const torch::jit::Module& module) {
  if (kind_of_layer(module).empty()) {
    bool calls = false;
    walk_methods(module, [&](const torch::jit::Node& node) { calls |= is_batch_norm(node); });
    if (calls)
      found.problems +=
          "\n  " + name + " calls batch_norm directly, with tensors that do not belong to a BatchNorm layer";
    return;
  }
  if (traced_in_eval(module)) {
    found.problems += "\n  " + name + " was traced in eval() and cannot train; trace or script it in train()";
    return;
  }
  const c10::weak_intrusive_ptr<c10::ivalue::Object> weak(module._ivalue());
  found.add({name, tensor_of(module, "running_mean"), tensor_of(module, "weight"), [weak] {
               const auto alive = weak.lock();
               return alive && torch::jit::Module(alive).is_training();
             }});
}

}  // namespace

FoundLayers find_layers(const torch::jit::Module& module) {
  FoundLayers found;
  for (const auto& item : module.named_modules())
    look_at(found, item.name.empty() ? "the module" : item.name, item.value);
  return found;
}

void run_as_written(const torch::jit::Module& module) {
  for (const torch::jit::Module& part : module.modules())
    for (torch::jit::Function* method : part.type()->methods())
      if (auto* function = torch::jit::tryToGraphFunction(*method))
        function->_set_initial_executor_execution_mode(torch::jit::ExecutorExecutionMode::SIMPLE);
}

}  // namespace lockstep
