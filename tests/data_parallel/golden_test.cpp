#include <gtest/gtest.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "data_parallel/recompute.h"
#include "support/ranks.h"

// Gradients, weights and buffers against those of PyTorch's DistributedDataParallel.

namespace lockstep::golden_test {
namespace {

using namespace testing;  // NOLINT

struct Case {
  std::string name;
  Engine engine;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " " << name_of(c.engine); }
};

class Golden : public ::testing::TestWithParam<Case> {};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* name :
       {"plain", "no_sync", "batch_norm", "branches", "shared", "recomputed", "several_forwards", "join", "weighted"})
    for (const Engine& engine :
         {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}, Engine{3, "hierarchical", "aab"},
          Engine{4, "hierarchical", "aabb"}, Engine{4, "hierarchical", "aaab"}})
      cases.push_back({name, engine});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(PyTorch, Golden, ::testing::ValuesIn(all_cases()), [](const auto& instance) {
  return instance.param.name + "_" + name_of(instance.param.engine);
});

void expect_close(const StateDict& actual, const StateDict& golden, double tolerance) {
  for (const auto& item : golden) {
    ASSERT_TRUE(actual.contains(item.key())) << item.key();
    const at::Tensor& value = actual[item.key()];
    EXPECT_TRUE(at::allclose(value.detach(), item.value(), tolerance, tolerance)) << item.key() << "\n"
                                                                                  << value << "\nPyTorch has\n"
                                                                                  << item.value();
  }
}

StateDict gradients_of(const torch::nn::Module& module) {
  StateDict gradients;
  for (const auto& item : module.named_parameters())
    if (item.value().grad().defined()) gradients.insert(item.key(), item.value().grad().clone());
  return gradients;
}

constexpr int kSteps = 20;

int inputs_of(const std::string& name, int rank) { return name == "join" ? 8 + 6 * rank : kSteps; }
int samples_of(const std::string& name, int rank) { return name == "weighted" ? 2 + 3 * rank : 4; }

void backward(const std::string& name, Model& model, int step, int rank) {
  const auto loss = [&](int at_step) {
    return loss_of(model, batch(at_step, rank, at::kFloat, samples_of(name, rank)), step, rank);
  };
  if (name == "several_forwards") return (loss(step) + loss(step + 200) * loss(step + 300)).backward();
  if (name != "recomputed") return loss(step).backward();
  auto* plain = dynamic_cast<Plain*>(&model);
  const Sample sample = batch(step, rank);
  Recompute::Segment first = [&](const at::Tensor& x) { return torch::tanh(plain->fc1(x)); };
  torch::mse_loss(plain->fc2(recompute(first, sample.data.requires_grad_())), sample.target).backward();
}

TEST_P(Golden, GradientsOfAStepAndWeightsAfterTwenty) {
  const Case& c = GetParam();
  const auto check = [&c](Context& context) {
    const StateDict golden = load(LOCKSTEP_SOURCE_DIR "/tests/golden/ddp.safetensors").tensors;
    const std::string place = c.name + "/" + std::to_string(c.engine.world_size) + "/";
    auto model = make_model(c.name);
    const bool weighted = c.name == "weighted";
    DistributedDataParallel replica(
        model, context, {.reduction = weighted ? GradientReduction::kWeightedMean : GradientReduction::kMean});
    auto optimizer = make_sgd(*model);
    const int rank = context.rank();
    if (weighted) replica.set_weight(samples_of(c.name, rank));
    const auto train = [&] {
      for (int step = 0; step < inputs_of(c.name, rank); ++step) {
        optimizer.zero_grad();
        if (c.name == "no_sync") {
          const auto guard = replica.no_sync();
          backward(c.name, *model, step + 100, rank);
        }
        backward(c.name, *model, step, rank);
        if (step == 0) {
          const StateDict expected = without_prefix(place + "grad/", golden);
          EXPECT_EQ(gradients_of(*model).size(), expected.size());
          expect_close(gradients_of(*model), expected, 1e-6);
        }
        optimizer.step();
      }
    };
    replica.join(train, {.enable = c.name == "join"});
    expect_close(state_dict(*model), without_prefix(place + "after/", golden), 2e-6);
  };
  run_ranks(c.engine, check);
}

}  // namespace
}  // namespace lockstep::golden_test
