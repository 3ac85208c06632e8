#include "train_c/recipe.h"

#include <utility>

#include <torch/nn/functional/loss.h>
#include <torch/script.h>

#include "train_c/arrays.h"
#include "train_c/guarded.h"
#include "train_c/script.h"

namespace lockstep::train_c {
namespace {

namespace F = torch::nn::functional;
using Tensors = std::vector<at::Tensor>;
/// A loss of one output and one target.
using PlainLoss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

/// LibTorch would broadcast other shapes, with a warning at best.
at::Tensor same_shapes(const std::string& name, const PlainLoss& loss, const at::Tensor& output,
                       const at::Tensor& target) {
  if (output.sizes() != target.sizes())
    refuse("the loss " + name, "the module's output is " + text_of(output) + " and the target " + text_of(target) +
                                   "; their shapes must be equal");
  return loss(output, target);
}

Loss one_to_one(std::string name, PlainLoss loss) {
  return [name = std::move(name), loss = std::move(loss)](const Tensors& outputs, const Tensors& targets) {
    if (outputs.size() != 1 || targets.size() != 1)
      refuse("the loss " + name, "it takes one output and one target, but there are " + std::to_string(outputs.size()) +
                                     " and " + std::to_string(targets.size()) +
                                     "; a TorchScript loss takes any number");
    return loss(outputs[0], targets[0]);
  };
}
Loss elementwise(const std::string& name, PlainLoss loss) {
  return one_to_one(name, [name, loss = std::move(loss)](const at::Tensor& output, const at::Tensor& target) {
    return same_shapes(name, loss, output, target);
  });
}

/// LibTorch's names of the two reductions are types.
template <typename Options>
Options reduced(Options options, bool is_sum) {
  if (is_sum)
    options.reduction(torch::kSum);
  else
    options.reduction(torch::kMean);
  return options;
}

Loss of_file(const std::string& path) {
  auto module = std::make_shared<torch::jit::Module>(load_script(path));
  return [module](const Tensors& outputs, const Tensors& targets) {
    std::vector<c10::IValue> arguments(outputs.begin(), outputs.end());
    arguments.insert(arguments.end(), targets.begin(), targets.end());
    const Tensors result = tensors_of("the TorchScript loss", module->forward(std::move(arguments)));
    if (result.size() != 1)
      refuse("the TorchScript loss", "it returns " + std::to_string(result.size()) + " tensors; it must return one");
    return result[0];
  };
}

Loss by_name(const std::string& name, Settings& of, bool is_sum) {
  if (name == "mse")
    return elementwise(name, [=](const auto& x, const auto& y) {
      return F::mse_loss(x, y, reduced(F::MSELossFuncOptions(), is_sum));
    });
  if (name == "l1")
    return elementwise(
        name, [=](const auto& x, const auto& y) { return F::l1_loss(x, y, reduced(F::L1LossFuncOptions(), is_sum)); });
  if (name == "smooth_l1")
    return elementwise(name, [=, beta = of.number("beta", 1)](const auto& x, const auto& y) {
      return F::smooth_l1_loss(x, y, reduced(F::SmoothL1LossFuncOptions(), is_sum).beta(beta));
    });
  if (name == "huber")
    return elementwise(name, [=, delta = of.number("delta", 1)](const auto& x, const auto& y) {
      return F::huber_loss(x, y, reduced(F::HuberLossFuncOptions(), is_sum).delta(delta));
    });
  if (name == "bce_with_logits")
    return elementwise(name, [=](const auto& x, const auto& y) {
      return F::binary_cross_entropy_with_logits(x, y, reduced(F::BinaryCrossEntropyWithLogitsFuncOptions(), is_sum));
    });
  if (name == "cross_entropy")
    return one_to_one(name, [=, smooth = of.number("label_smoothing", 0)](const auto& x, const auto& y) {
      return F::cross_entropy(x, y, reduced(F::CrossEntropyFuncOptions(), is_sum).label_smoothing(smooth));
    });
  if (name == "nll")
    return one_to_one(name, [=](const auto& x, const auto& y) {
      return F::nll_loss(x, y, reduced(F::NLLLossFuncOptions(), is_sum));
    });
  of.refuse_entry("type",
                  "known are mse, l1, smooth_l1, huber, bce_with_logits, cross_entropy, nll, module and torchscript");
}

}  // namespace

void choose_loss(Settings& settings, Recipe& recipe) {
  std::optional<Settings> of = settings.part("loss");
  if (!of) refuse("the configuration", "it has no loss, which is required");
  const std::string name = of->required_text("type");
  const std::string reduction = of->text("reduction", "mean");
  if (reduction != "mean" && reduction != "sum") of->refuse_entry("reduction", "give mean or sum");
  recipe.is_sum = reduction == "sum";
  if (name == "module")
    recipe.loss_is_module = true;
  else if (name == "torchscript")
    recipe.loss = of_file(of->required_text("file"));
  else
    recipe.loss = by_name(name, *of, recipe.is_sum);
  of->finish();
}

}  // namespace lockstep::train_c
