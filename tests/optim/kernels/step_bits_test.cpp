#include <gtest/gtest.h>

#include "collectives/shm/hard_elements.h"
#include "optim/kernels/step_kernel.h"

// The step kernels of all instruction sets and processors against one another, by way of one number;
// step_kernel_test.cpp has them on tensors, fused_step_test.cpp against LibTorch's optimizers.

namespace lockstep::optim {
namespace {

using shm::DataType;
using shm::InstructionSet;

/// What every set of kernels gave on x86-64 and on aarch64; see collectives/shm/reduce_bits_test.cpp.
constexpr const char* kEveryProcessor = "7416b29104396089";

/// Without the standard library's mathematics, which may differ from one machine to the next.
StepConstants constants_of(Algorithm algorithm, int t) {
  if (algorithm == Algorithm::kAdam || algorithm == Algorithm::kAdamAmsgrad)
    return {.weight_decay = 0.01,
            .decay = 0.99,
            .step_size = 0.02 / t,
            .momentum = 0.9,
            .dampened = 0.1,
            .beta2 = 0.99,
            .one_minus_beta2 = 0.01,
            .root = 0.1 * t,
            .eps = 1e-8};
  return {.weight_decay = 0.01, .step_size = 0.1, .momentum = 0.9, .dampened = 0.6};
}

/// Three steps from hard values, with hard gradients, of every algorithm, type and length of a tail.
std::string bits_of(InstructionSet set) {
  Hash hash;
  unsigned seed = 1;
  for (const auto type : {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBFloat16})
    for (int a = 0; a < kAlgorithms; ++a)
      for (const bool with_master : {false, true}) {
        const auto algorithm = static_cast<Algorithm>(a);
        const StepFunction step = find_step(type, algorithm, with_master, set);
        if (step == nullptr) continue;
        const DataType kept = with_master ? DataType::kFloat32 : type;
        for (const size_t count : {size_t{1}, size_t{7}, size_t{32}, size_t{203}}) {
          const size_t off = seed % 16;
          const auto fresh = [&](DataType of) {
            auto values = hard_elements(of, count, seed++);
            values.insert(values.begin(), off, std::byte{0});
            return values;
          };
          auto parameter = fresh(type), master = fresh(DataType::kFloat32);
          std::vector<std::byte> state[3] = {fresh(kept), fresh(kept), fresh(kept)};
          for (int t = 1; t <= 3; ++t) {
            const auto gradient = fresh(type);
            const StepConstants constants = constants_of(algorithm, t);
            step({.gradient = gradient.data() + off,
                  .parameter = parameter.data() + off,
                  .master = with_master ? master.data() + off : nullptr,
                  .state = {state[0].data() + off, state[1].data() + off, state[2].data() + off},
                  .count = count,
                  .constants = &constants});
          }
          add_elements(hash, type, parameter.data() + off, count);
          if (with_master) add_elements(hash, DataType::kFloat32, master.data() + off, count);
          for (const auto& array : state) add_elements(hash, kept, array.data() + off, count);
        }
      }
  return hash.digits();
}

TEST(StepBits, AreTheSameOnEveryProcessor) {
  int sets = 0;
  for (const auto set :
       {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512, InstructionSet::kNeon}) {
    if (!shm::is_supported(set)) continue;
    EXPECT_EQ(bits_of(set), kEveryProcessor) << shm::name(set);
    std::printf("%s: compared\n", shm::name(set));
    ++sets;
  }
  EXPECT_GE(sets, 1);
}

}  // namespace
}  // namespace lockstep::optim
