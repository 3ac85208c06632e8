#include <gtest/gtest.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "support/ranks.h"

// Gradients, weights and buffers against those of PyTorch's DistributedDataParallel.

namespace lockstep {
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
  for (const char* name : {"plain", "no_sync", "batch_norm", "branches", "shared"})
    for (const char* backend : {"shm", "gloo"})
      for (int world_size : {2, 3}) cases.push_back({name, {world_size, backend}});
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

TEST_P(Golden, GradientsOfAStepAndWeightsAfterTen) {
  const Case& c = GetParam();
  const auto check = [&c](Context& context) {
    const StateDict golden = load(LOCKSTEP_SOURCE_DIR "/tests/golden/ddp.safetensors").tensors;
    const std::string place = c.name + "/" + std::to_string(c.engine.world_size) + "/";
    auto model = make_model(c.name);
    DistributedDataParallel replica(model, context);
    auto optimizer = make_sgd(*model);
    const int rank = context.rank();
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      if (c.name == "no_sync") {
        const auto guard = replica.no_sync();
        loss_of(*model, batch(step + 100, rank), step, rank).backward();
      }
      loss_of(*model, batch(step, rank), step, rank).backward();
      if (step == 0) {
        const StateDict expected = without_prefix(place + "grad/", golden);
        EXPECT_EQ(gradients_of(*model).size(), expected.size());
        expect_close(gradients_of(*model), expected, 1e-6);
      }
      optimizer.step();
    }
    expect_close(state_dict(*model), without_prefix(place + "after/", golden), 1e-6);
  };
  run_ranks(c.engine, check);
}

}  // namespace
}  // namespace lockstep
