#include <gtest/gtest.h>

#include "collectives/shm/hard_elements.h"
#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/reference.h"

// The kernels of all instruction sets and processors against one another, by way of one number.

namespace lockstep::shm {
namespace {

/// What every set of kernels gave on x86-64 and on aarch64. A change of the order of additions, or of a rounding,
/// changes it; so do other inputs (hard_elements.h) and other cases (below).
constexpr const char* kEveryProcessor = "4ae97aabfb82d9a9";

/// Of all types, operations, numbers of inputs, lengths of tails and places in memory.
std::string bits_of(InstructionSet set) {
  Hash hash;
  unsigned seed = 1;
  for (int t = 0; t < kDataTypes; ++t)
    for (int o = 0; o < kReduceOps; ++o) {
      const auto type = static_cast<DataType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (!is_meaningful(type, op)) continue;
      for (const int input_count : {1, 2, 3, 5, 8, 13})
        for (const size_t count : {size_t{1}, size_t{2}, size_t{5}, size_t{31}, size_t{64}, size_t{301}}) {
          const size_t off = seed % 16;  // bytes: nothing may depend on alignment
          std::vector<std::vector<std::byte>> data;
          std::vector<const void*> inputs;
          std::vector<double> factors;
          for (int i = 0; i < input_count; ++i) {
            data.push_back(hard_elements(type, count, seed++));
            data.back().insert(data.back().begin(), off, std::byte{0xee});
            factors.push_back(0.375 * i - 1);
          }
          for (const auto& input : data) inputs.push_back(input.data() + off);
          std::vector<std::byte> result(off + 1 + count * element_bytes(type), std::byte{0xee});
          void* outputs[] = {result.data() + off};
          find_reduce(type, op, input_count, set)({outputs, 1, inputs.data(), input_count, count, factors.data()});
          EXPECT_EQ(result.back(), std::byte{0xee});
          add_elements(hash, type, result.data() + off, count);
        }
    }
  return hash.digits();
}

TEST(ReduceBits, AreTheSameOnEveryProcessor) {
  int sets = 0;
  for (const auto set :
       {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512, InstructionSet::kNeon}) {
    if (!is_supported(set)) continue;
    EXPECT_EQ(bits_of(set), kEveryProcessor) << name(set);
    std::printf("%s: compared\n", name(set));
    ++sets;
  }
  EXPECT_GE(sets, 1);
}

}  // namespace
}  // namespace lockstep::shm
