#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/zero_redundancy_optimizer.h>

// Fused steps against PyTorch's; tests/golden/write_optimizer_golden.py has the other side.

namespace lockstep {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

at::Tensor formula(at::IntArrayRef shape, int key) {
  const at::Tensor value =
      at::arange(c10::multiply_integers(shape), at::kDouble) * 0.6180339887498949 + static_cast<double>(key) * 0.3771;
  return (value - value.floor() - 0.5).reshape(shape);
}

const StateDict& golden() {
  static const StateDict all = load(LOCKSTEP_SOURCE_DIR "/tests/golden/optimizer.safetensors").tensors;
  return all;
}

/// The greatest distance in units of a value's last place of `dtype`, where values are above 2^-7.
double distance(const at::Tensor& mine, const at::Tensor& theirs, double last_place) {
  const at::Tensor unit = theirs.abs().clamp_min(1.0 / 128) * last_place;
  return ((mine.to(at::kDouble) - theirs) / unit).abs().max().item<double>();
}

template <typename Options>
void compare(const std::string& name, Options options) {
  const std::vector<std::vector<int64_t>> shapes = {{5, 7}, {33}, {2, 3, 4}};
  for (const auto& [type, dtype, last_place, most] :
       {std::tuple("float32", at::kFloat, 0x1p-23, 64.0), std::tuple("float64", at::kDouble, 0x1p-52, 64.0),
        std::tuple("bfloat16", at::kBFloat16, 0x1p-7, 2.0)}) {
    std::vector<at::Tensor> parameters;
    for (size_t i = 0; i < shapes.size(); ++i)
      parameters.push_back(formula(shapes[i], static_cast<int>(i)).to(dtype).requires_grad_());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{parameters[0]});
    groups.emplace_back(std::vector<at::Tensor>{parameters[1], parameters[2]});
    ZeroRedundancyOptimizer optimizer(groups, options);
    auto& half = optimizer.param_groups()[1].options();
    half.set_lr(half.get_lr() * 0.5);
    for (int step = 0; step < 50; ++step) {
      for (size_t i = 0; i < shapes.size(); ++i) {
        const bool unused = i == 2 && step % 3 != 1;
        parameters[i].mutable_grad() =
            unused ? at::Tensor() : formula(shapes[i], 10 + 3 * step + static_cast<int>(i)).to(dtype);
      }
      optimizer.step();
    }
    StateDict mine = state_dict(optimizer);
    for (size_t i = 0; i < shapes.size(); ++i) mine.insert(std::to_string(i), parameters[i].detach());
    size_t compared = 0;
    const std::string prefix = name + "/" + type + "/";
    for (const auto& item : golden()) {
      if (!item.key().starts_with(prefix)) continue;
      const std::string key = item.key().substr(prefix.size());
      ASSERT_NE(mine.find(key), nullptr) << item.key();
      EXPECT_LE(distance(mine[key], item.value(), last_place), most) << item.key();
      ++compared;
    }
    EXPECT_GE(compared, shapes.size()) << prefix;
  }
}

TEST(OptimizerGolden, StepsAreThoseOfPyTorch) {
  compare("sgd", SGDOptions(0.05).weight_decay(0.1));
  compare("sgd_momentum", SGDOptions(0.05).momentum(0.9).dampening(0.4));
  compare("sgd_nesterov", SGDOptions(0.05).momentum(0.8).nesterov(true).weight_decay(0.01));
  compare("adam", AdamOptions(0.01).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1));
  compare("adam_amsgrad", AdamOptions(0.01).amsgrad(true));
  compare("adamw", AdamWOptions(0.01).weight_decay(0.1));
  compare("adamw_amsgrad", AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
}

}  // namespace
}  // namespace lockstep
