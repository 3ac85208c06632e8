#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include <lockstep/checkpoint.h>

#include "checkpoint/failure.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;
using torch::optim::Optimizer;

/// Two parameters with values of their own and gradients that change from step to step.
struct Model {
  std::vector<at::Tensor> parameters{torch::linspace(-1, 1, 6).reshape({2, 3}).requires_grad_(),
                                     torch::linspace(2, 3, 4).requires_grad_()};

  void train(Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      for (const auto& parameter : parameters) (parameter * parameter * (1 + 0.3 * step)).sum().backward();
      optimizer.step();
    }
  }
  std::string values() const { return hash({{"0", parameters[0]}, {"1", parameters[1]}}); }
};

using Make = std::function<std::unique_ptr<Optimizer>(const Model&)>;

struct Kind {
  std::string name;
  Make make;
  size_t entries;  ///< of its state, for two parameters
};

/// For GoogleTest.
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

template <typename O, typename Options>
Make maker(Options options) {
  return [options](const Model& model) { return std::make_unique<O>(model.parameters, options); };
}

std::vector<Kind> kinds() {
  using namespace torch::optim;
  return {{"sgd", maker<SGD>(SGDOptions(0.1)), 0},
          {"momentum", maker<SGD>(SGDOptions(0.1).momentum(0.9).weight_decay(0.01)), 2},
          {"nesterov", maker<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true)), 2},
          {"adam", maker<Adam>(AdamOptions(0.1)), 6},
          {"adam_amsgrad", maker<Adam>(AdamOptions(0.1).amsgrad(true)), 8},
          {"adamw", maker<AdamW>(AdamWOptions(0.1)), 6},
          {"adamw_amsgrad", maker<AdamW>(AdamWOptions(0.1).amsgrad(true)), 8}};
}

const Kind& kind(const std::string& name) {
  static const auto all = kinds();
  return *std::find_if(all.begin(), all.end(), [&](const Kind& candidate) { return candidate.name == name; });
}

/// The state after three steps, copied.
StateDict state_after_three(const std::string& name) {
  Model model;
  const auto optimizer = kind(name).make(model);
  model.train(*optimizer, 0, 3);
  StateDict copy;
  for (const auto& item : state_dict(*optimizer)) copy.insert(item.key(), item.value().clone());
  return copy;
}

class EveryOptimizer : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, EveryOptimizer, ::testing::ValuesIn(kinds()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(EveryOptimizer, GoesOnWithTheSameBits) {
  Model straight;
  const auto optimizer = GetParam().make(straight);
  straight.train(*optimizer, 0, 3);

  TemporaryFolder folder;
  const std::string path = folder.path() / "optimizer.safetensors";
  save({state_dict(*optimizer), {}}, path);
  Model resumed;
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) resumed.parameters[i].copy_(straight.parameters[i]);
  }
  const auto fresh = GetParam().make(resumed);
  const Checkpoint loaded = load(path);
  EXPECT_EQ(loaded.tensors.size(), GetParam().entries);
  load_state_dict(*fresh, loaded.tensors);
  EXPECT_EQ(hash(state_dict(*fresh)), hash(state_dict(*optimizer)));

  straight.train(*optimizer, 3, 8);
  resumed.train(*fresh, 3, 8);
  EXPECT_EQ(resumed.values(), straight.values());
}

TEST_P(EveryOptimizer, ForgetsWhatItRememberedBefore) {
  Model model;
  const auto optimizer = GetParam().make(model);
  model.train(*optimizer, 0, 5);
  load_state_dict(*optimizer, StateDict());
  EXPECT_TRUE(state_dict(*optimizer).is_empty());
}

TEST_P(EveryOptimizer, LoadingCopies) {
  Model model;
  const auto optimizer = GetParam().make(model);
  const StateDict state = state_after_three(GetParam().name);
  load_state_dict(*optimizer, state);
  const std::string before = hash(state);
  model.train(*optimizer, 3, 5);
  EXPECT_EQ(hash(state), before);
}

/// Expects that `state` is refused by a trained optimizer of `name`, with all of `parts`, and changes nothing.
void expect_refused(const std::string& name, const StateDict& state, const std::vector<std::string>& parts) {
  Model model;
  const auto optimizer = kind(name).make(model);
  model.train(*optimizer, 0, 2);
  const std::string before = hash(state_dict(*optimizer));
  const std::string text = failure([&] { load_state_dict(*optimizer, state); });
  EXPECT_NE(text, "") << name << " took it";
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
  EXPECT_EQ(hash(state_dict(*optimizer)), before);
}

TEST(OptimizerState, HasPyTorchsNames) {
  EXPECT_EQ(state_after_three("adam_amsgrad").keys(),
            (std::vector<std::string>{"0.step", "0.exp_avg", "0.exp_avg_sq", "0.max_exp_avg_sq", "1.step", "1.exp_avg",
                                      "1.exp_avg_sq", "1.max_exp_avg_sq"}));
  EXPECT_EQ(state_after_three("momentum").keys(), (std::vector<std::string>{"0.momentum_buffer", "1.momentum_buffer"}));
  EXPECT_EQ(state_after_three("adam")["0.step"].item<float>(), 3);
}

TEST(OptimizerState, ThatOfAnotherKindIsRefused) {
  expect_refused("adam", state_after_three("momentum"), {"unknown: 0.momentum_buffer", "unknown: 1.momentum_buffer"});
  expect_refused("momentum", state_after_three("adamw"),
                 {"another kind of optimizer", "unknown: 0.step", "unknown: 1.exp_avg_sq"});
  expect_refused("adam_amsgrad", state_after_three("adam"), {"missing: 0.max_exp_avg_sq", "missing: 1.max_exp_avg_sq"});
}

TEST(OptimizerState, AllProblemsAreListed) {
  StateDict state = state_after_three("adam");
  state["0.exp_avg"] = torch::ones({3, 2});
  state["0.step"] = torch::ones({1});
  state["1.step"] = torch::scalar_tensor(NAN);
  state["1.exp_avg"] = torch::scalar_tensor(1);
  state.erase("1.exp_avg_sq");
  state.insert("2.step", torch::scalar_tensor(1));
  state.insert("00.step", torch::scalar_tensor(1));
  expect_refused(
      "adam", state,
      {"0.exp_avg: shape [3, 2] given, [2, 3] in the parameter", "0.step: shape [1] given, expected a scalar",
       "1.step: nan is not a number of steps", "1.exp_avg: shape [] given, [4] in the parameter",
       "missing: 1.exp_avg_sq", "unknown: 2.step", "unknown: 00.step"});
  expect_refused("adam", {{"0.step", torch::scalar_tensor(-1)}}, {"-1 is not a number of steps", "missing: 0.exp_avg"});
  expect_refused("momentum", {{"0.momentum_buffer", torch::ones({2, 3}, torch::kComplexFloat)}}, {"complex numbers"});
}

TEST(OptimizerState, FollowsTheParametersDtype) {
  Model model;
  model.parameters[0] = torch::ones({2, 3}, torch::kDouble).requires_grad_();
  const auto optimizer = kind("momentum").make(model);
  load_state_dict(*optimizer, {{"0.momentum_buffer", torch::full({2, 3}, 0.5)}});
  EXPECT_EQ(state_dict(*optimizer)["0.momentum_buffer"].scalar_type(), torch::kDouble);
  model.train(*optimizer, 0, 1);
}

TEST(OptimizerState, AParameterThatNeverHadAGradientHasNone) {
  Model model;
  const auto optimizer = kind("momentum").make(model);
  (model.parameters[1] * 2).sum().backward();
  optimizer->step();
  const StateDict state = state_dict(*optimizer);
  EXPECT_EQ(state.keys(), std::vector<std::string>{"1.momentum_buffer"});
  Model other;
  const auto fresh = kind("momentum").make(other);
  load_state_dict(*fresh, state);
  EXPECT_EQ(hash(state_dict(*fresh)), hash(state));
}

TEST(OptimizerState, AnUnknownOptimizerIsRefused) {
  const Model model;
  const torch::optim::LBFGS optimizer(model.parameters);
  EXPECT_THROW(state_dict(optimizer), c10::Error);
}

}  // namespace
}  // namespace lockstep
