#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep {

/// Detects layers, parameters or buffers of a module that were added, replaced or removed.
/// REQUIRES: the module lives during a call.
class ModuleWatch {
 public:
  ModuleWatch() = default;
  explicit ModuleWatch(const torch::nn::Module& module) { remember(module); }

  /// Records the module's present state.
  void remember(const torch::nn::Module& module) {
    layers_.clear();
    layers_.push_back(Layer::of(module));
    for (size_t i = 0; i < layers_.size(); ++i)
      for (const auto& child : std::vector(layers_[i].children)) layers_.push_back(Layer::of(*child));
    next_ = 0;
  }

  /// Whether the module was edited since remember(). Each call inspects the next part of a large module, so it takes
  /// microseconds, and finds a change within a few calls.
  bool is_edited() {
    for (size_t looked = 0; looked < std::min(kModulesAtOnce, layers_.size()); ++looked) {
      next_ = (next_ + 1) % layers_.size();
      if (layers_[next_].is_edited()) return true;
    }
    return false;
  }

 private:
  static constexpr size_t kModulesAtOnce = 64;

  /// Gives access to the parameters that a module holds directly. named_parameters() would copy all names: with a
  /// thousand parameters, that took 0.1 ms per call.
  struct Held : torch::nn::Module {
    static const torch::OrderedDict<std::string, at::Tensor>& parameters_of(const torch::nn::Module& module) {
      return module.*(&Held::parameters_);
    }
  };

  /// One module and its direct contents when remember() was called.
  struct Layer {
    const torch::nn::Module* module;  ///< alive because the layer around it holds it
    std::vector<std::shared_ptr<torch::nn::Module>> children;
    std::vector<const c10::TensorImpl*> parameters;
    std::vector<const c10::TensorImpl*> buffers;

    static Layer of(const torch::nn::Module& module) {
      Layer layer{&module, module.children(), {}, {}};
      for (const auto& parameter : Held::parameters_of(module))
        layer.parameters.push_back(parameter.value().unsafeGetTensorImpl());
      for (const auto& buffer : module.named_buffers(/*recurse=*/false))
        layer.buffers.push_back(buffer.value().unsafeGetTensorImpl());
      return layer;
    }

    bool is_edited() const {
      // Most layers have few buffers or none, so the copy that named_buffers() makes costs little. The module's own
      // dictionary is private.
      return !are(parameters, Held::parameters_of(*module)) ||
             !are(buffers, module->named_buffers(/*recurse=*/false)) || module->children() != children;
    }

    static bool are(const std::vector<const c10::TensorImpl*>& known,
                    const torch::OrderedDict<std::string, at::Tensor>& now) {
      return std::equal(
          now.begin(), now.end(), known.begin(), known.end(),
          [](const auto& item, const c10::TensorImpl* tensor) { return item.value().unsafeGetTensorImpl() == tensor; });
    }
  };

  std::vector<Layer> layers_;
  size_t next_ = 0;
};

}  // namespace lockstep
