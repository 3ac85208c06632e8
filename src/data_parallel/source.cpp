#include "data_parallel/source.h"

#include <algorithm>
#include <unordered_set>

#include <torch/csrc/jit/api/module.h>

namespace lockstep {
namespace {

NamedTensors each_once(NamedTensors tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(tensors, [&](const auto& named) { return !seen.insert(named.second.unsafeGetTensorImpl()).second; });
  return tensors;
}

/// The parameters that a module holds directly, without the copy of all names that named_parameters() makes: with a
/// thousand parameters, that took 0.1 ms in each call.
struct Held : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& parameters_of(const torch::nn::Module& module) {
    return module.*(&Held::parameters_);
  }
};

class NnModule final : public Source {
 public:
  explicit NnModule(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  NamedTensors parameters() const override { return list(module_->named_parameters()); }
  NamedTensors buffers() const override { return list(module_->named_buffers()); }
  bool is_training() const override { return module_->is_training(); }

  bool is_edited() override {
    for (size_t looked = 0; looked < std::min(kModulesAtOnce, layers_.size()); ++looked) {
      next_ = (next_ + 1) % layers_.size();
      if (layers_[next_].is_edited()) return true;
    }
    return false;
  }

  void remember() override {
    layers_.clear();
    layers_.push_back(Layer::of(module_));
    for (size_t i = 0; i < layers_.size(); ++i)
      for (const auto& child : std::vector(layers_[i].children)) layers_.push_back(Layer::of(child));
    next_ = 0;
  }

 private:
  static constexpr size_t kModulesAtOnce = 64;

  /// One module and what it held directly when remember() was called.
  struct Layer {
    std::shared_ptr<torch::nn::Module> module;
    std::vector<std::shared_ptr<torch::nn::Module>> children;
    std::vector<const c10::TensorImpl*> parameters;
    std::vector<const c10::TensorImpl*> buffers;

    static Layer of(const std::shared_ptr<torch::nn::Module>& module) {
      Layer layer{module, module->children(), {}, {}};
      for (const auto& parameter : Held::parameters_of(*module))
        layer.parameters.push_back(parameter.value().unsafeGetTensorImpl());
      for (const auto& buffer : module->named_buffers(/*recurse=*/false))
        layer.buffers.push_back(buffer.value().unsafeGetTensorImpl());
      return layer;
    }

    bool is_edited() const {
      // Most layers have no or few buffers, so the copy that named_buffers() makes costs little. The module's own
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

  static NamedTensors list(const torch::OrderedDict<std::string, at::Tensor>& dictionary) {
    NamedTensors tensors;
    for (const auto& item : dictionary)
      if (item.value().defined()) tensors.emplace_back(item.key(), item.value());
    return each_once(std::move(tensors));
  }

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<Layer> layers_;
  size_t next_ = 0;
};

class JitModule final : public Source {
 public:
  explicit JitModule(const torch::jit::Module& module) : module_(module) {}

  NamedTensors parameters() const override { return list(module_.named_parameters()); }
  NamedTensors buffers() const override { return list(module_.named_buffers()); }
  bool is_training() const override { return module_.is_training(); }

 private:
  template <typename List>
  static NamedTensors list(const List& slots) {
    NamedTensors tensors;
    for (const auto& slot : slots) tensors.emplace_back(slot.name, slot.value);
    return each_once(std::move(tensors));
  }

  const torch::jit::Module module_;
};

class TensorList final : public Source {
 public:
  explicit TensorList(NamedTensors parameters) : parameters_(std::move(parameters)) {}
  NamedTensors parameters() const override { return parameters_; }
  bool is_list() const override { return true; }

 private:
  const NamedTensors parameters_;
};

}  // namespace

std::unique_ptr<Source> source_of(std::shared_ptr<torch::nn::Module> module) {
  return std::make_unique<NnModule>(std::move(module));
}
std::unique_ptr<Source> source_of(const torch::jit::Module& module) { return std::make_unique<JitModule>(module); }
std::unique_ptr<Source> source_of(NamedTensors parameters) {
  return std::make_unique<TensorList>(std::move(parameters));
}

}  // namespace lockstep
