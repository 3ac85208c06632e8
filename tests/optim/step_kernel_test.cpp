#include "optim/kernels/step_kernel.h"

#include <cmath>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

// The kernels against each other; fused_step_test.cpp has them against LibTorch's optimizers.

namespace lockstep::optim {
namespace {

using shm::DataType;
using shm::InstructionSet;

constexpr InstructionSet kSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512};
constexpr Algorithm kEveryAlgorithm[] = {Algorithm::kSgd, Algorithm::kSgdMomentum, Algorithm::kSgdNesterov,
                                         Algorithm::kAdam, Algorithm::kAdamAmsgrad};

DataType type_of(at::ScalarType type) {
  return type == at::kFloat    ? DataType::kFloat32
         : type == at::kDouble ? DataType::kFloat64
         : type == at::kHalf   ? DataType::kFloat16
                               : DataType::kBFloat16;
}

/// What a step reads and writes.
struct Place {
  at::Tensor parameter;
  std::optional<at::Tensor> master;
  std::vector<at::Tensor> state;

  Place(const at::Tensor& start, bool with_master) : parameter(start.clone()) {
    if (with_master) master = at::zeros_like(start, at::kFloat);
    for (int s = 0; s < 3; ++s) state.push_back(at::zeros_like(start, with_master ? at::kFloat : start.scalar_type()));
  }
  void step(StepFunction function, const at::Tensor& gradient, const StepConstants& constants) {
    function({.gradient = gradient.const_data_ptr(),
              .parameter = parameter.mutable_data_ptr(),
              .master = master ? master->mutable_data_ptr() : nullptr,
              .state = {state[0].mutable_data_ptr(), state[1].mutable_data_ptr(), state[2].mutable_data_ptr()},
              .count = static_cast<size_t>(parameter.numel()),
              .constants = &constants});
  }
  bool operator==(const Place& other) const {
    for (size_t s = 0; s < state.size(); ++s)
      if (!state[s].equal(other.state[s])) return false;
    return parameter.equal(other.parameter) && (!master || master->equal(*other.master));
  }
};

/// Sizes that leave tails of every length behind whole vectors.
constexpr int64_t kMost = 67;

at::Tensor random_values(int64_t n, at::ScalarType type) { return at::randn({n}, at::kDouble).to(type); }

StepConstants constants_of(Algorithm algorithm, int t) {
  if (algorithm == Algorithm::kAdam || algorithm == Algorithm::kAdamAmsgrad)
    return {.weight_decay = 0.01,
            .decay = 0.99,
            .step_size = 1e-2 / (1 - std::pow(0.9, t)),
            .momentum = 0.9,
            .dampened = 1 - 0.9,
            .beta2 = 0.99,
            .one_minus_beta2 = 1 - 0.99,
            .root = std::sqrt(1 - std::pow(0.99, t)),
            .eps = 1e-8};
  return {.weight_decay = 0.01, .step_size = 0.1, .momentum = 0.9, .dampened = 0.6};
}

TEST(StepKernel, EveryInstructionSetHasTheSameBits) {
  torch::manual_seed(2);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const Algorithm algorithm : kEveryAlgorithm)
      for (const bool with_master : {false, true}) {
        if (with_master && (type == at::kFloat || type == at::kDouble)) {
          EXPECT_EQ(find_step(type_of(type), algorithm, with_master), nullptr);
          continue;
        }
        for (int64_t n = 1; n <= kMost; ++n) {
          const at::Tensor start = random_values(n, type);
          std::vector<Place> places;
          for (size_t s = 0; s < 3; ++s) places.emplace_back(start, with_master);
          for (int t = 1; t <= 3; ++t) {
            const at::Tensor gradient = random_values(n, type);
            for (size_t s = 0; s < 3; ++s)
              if (shm::is_supported(kSets[s]))
                places[s].step(find_step(type_of(type), algorithm, with_master, kSets[s]), gradient,
                               constants_of(algorithm, t));
          }
          if (n == kMost) {
            EXPECT_FALSE(places[0].parameter.equal(start));
          }
          for (size_t s = 1; s < 3; ++s)
            if (shm::is_supported(kSets[s])) {
              EXPECT_EQ(places[s], places[0]) << shm::name(kSets[s]) << ", " << type << ", algorithm "
                                              << static_cast<int>(algorithm) << ", " << n << " elements";
            }
        }
      }
}

TEST(StepKernel, AMasterKeepsWhatTheParameterHasNoRoomFor) {
  torch::manual_seed(3);
  for (const auto type : {at::kHalf, at::kBFloat16})
    for (const Algorithm algorithm : kEveryAlgorithm) {
      const at::Tensor start = random_values(kMost, type);
      Place kept(start, /*with_master=*/true), exact(start.to(at::kFloat), /*with_master=*/false);
      for (int t = 1; t <= 20; ++t) {
        const at::Tensor gradient = random_values(kMost, type);
        const StepConstants constants = constants_of(algorithm, t);
        if (t == 10) {  // someone else writes some of the parameters; these start anew from there
          kept.parameter.narrow(0, 5, 9).fill_(0.3);
          exact.parameter.narrow(0, 5, 9).copy_(kept.parameter.narrow(0, 5, 9));
        }
        kept.step(find_step(type_of(type), algorithm, /*with_master=*/true), gradient, constants);
        exact.step(find_step(DataType::kFloat32, algorithm), gradient.to(at::kFloat), constants);
        ASSERT_TRUE(kept.master->equal(exact.parameter)) << type << ", step " << t;
        ASSERT_TRUE(kept.parameter.equal(exact.parameter.to(type))) << type << ", step " << t;
      }
    }
}

}  // namespace
}  // namespace lockstep::optim
