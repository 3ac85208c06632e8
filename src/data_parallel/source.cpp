#include "data_parallel/source.h"

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include <torch/csrc/jit/api/module.h>

#include "collectives/module_watch.h"

namespace lockstep {
namespace {

NamedTensors each_once(NamedTensors tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(tensors, [&](const auto& named) { return !seen.insert(named.second.unsafeGetTensorImpl()).second; });
  return tensors;
}

/// Empty unless the module is one of LibTorch's: a program's own descriptions may legitimately differ by rank.
std::string line_of(const std::string& name, const torch::nn::Module& module) {
  std::ostringstream text;
  module.pretty_print(text);
  std::string options = text.str();
  if (!options.starts_with("torch::nn::")) return "";
  std::replace(options.begin(), options.end(), '\n', ' ');
  return name + ": " + options + '\n';
}

class NnModule final : public Source {
 public:
  explicit NnModule(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  NamedTensors parameters() const override { return list(module_->named_parameters()); }
  NamedTensors buffers() const override { return list(module_->named_buffers()); }
  bool is_training() const override { return module_->is_training(); }
  std::string layers() const override {
    std::string lines;
    for (const auto& item : module_->named_modules("", /*include_self=*/false))
      lines += line_of(item.key(), *item.value());
    return lines.empty() ? line_of("the module", *module_) : lines;
  }

  bool is_edited() override { return watch_.is_edited(); }
  void remember() override { watch_.remember(*module_); }

 private:
  static NamedTensors list(const torch::OrderedDict<std::string, at::Tensor>& dictionary) {
    NamedTensors tensors;
    for (const auto& item : dictionary)
      if (item.value().defined()) tensors.emplace_back(item.key(), item.value());
    return each_once(std::move(tensors));
  }

  const std::shared_ptr<torch::nn::Module> module_;
  ModuleWatch watch_;
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
  TORCH_CHECK(module != nullptr,
              "DistributedDataParallel: the module is empty (nullptr, or a ModuleHolder made from it); construct it "
              "first");
  return std::make_unique<NnModule>(std::move(module));
}
std::unique_ptr<Source> source_of(const torch::jit::Module& module) { return std::make_unique<JitModule>(module); }
std::unique_ptr<Source> source_of(NamedTensors parameters) {
  return std::make_unique<TensorList>(std::move(parameters));
}

}  // namespace lockstep
