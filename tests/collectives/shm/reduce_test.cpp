#include "collectives/shm/kernels/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "collectives/shm/reference.h"

namespace lockstep::shm {
namespace {

constexpr int kInputs[] = {1, 2, 3, 4, 5, 6, 7, 8, 13, 64};
constexpr size_t kCounts[] = {0, 1, 3, 15, 16, 17, 63, 64, 65, 127, 1000};

class ReduceKernels : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "SKIPPED BECAUSE this processor has no " << name(GetParam());
  }
};

/// Runs the kernel into two outputs, the second being input 0 itself, and compares with the plain loops.
void check(InstructionSet set, DataType type, ReduceOp op, int input_count, size_t count) {
  const std::string what =
      std::string(name(type)) + " " + name(op) + " x" + std::to_string(input_count) + " count " + std::to_string(count);
  const size_t bytes = count * element_bytes(type);
  std::vector<std::vector<std::byte>> data;
  std::vector<double> factors;
  for (int i = 0; i < input_count; ++i) {
    data.push_back(random_elements(type, op, count, 1000u + static_cast<unsigned>(i)));
    factors.push_back(0.3 * i - 1);
  }
  const auto expected = reference_reduce(type, op, data, factors);
  // One byte off, so that nothing depends on alignment.
  std::vector<std::byte> first(bytes + 65, std::byte{0xee});
  std::copy(data[0].begin(), data[0].end(), first.begin() + 1);
  std::vector<std::byte> output(bytes + 64, std::byte{0xee});
  std::vector<const void*> inputs{first.data() + 1};
  for (int i = 1; i < input_count; ++i) inputs.push_back(data[static_cast<size_t>(i)].data());
  void* outputs[] = {output.data(), first.data() + 1};
  const ReduceFunction kernel = find_reduce(type, op, input_count, set);
  ASSERT_NE(kernel, nullptr) << what;
  kernel({outputs, 2, inputs.data(), input_count, count, factors.data()});
  EXPECT_TRUE(same_elements(type, output.data(), expected.data(), count)) << what;
  EXPECT_EQ(std::memcmp(first.data() + 1, output.data(), bytes), 0) << what;
  for (size_t i = bytes; i < output.size(); ++i) ASSERT_EQ(output[i], std::byte{0xee}) << what;
}

TEST_P(ReduceKernels, AgreeWithPlainLoopsBitForBit) {
  int checked = 0;
  for (int type = 0; type < kDataTypes; ++type)
    for (int op = 0; op < kReduceOps; ++op) {
      const auto data_type = static_cast<DataType>(type);
      const auto reduce_op = static_cast<ReduceOp>(op);
      ASSERT_EQ(find_reduce(data_type, reduce_op, 2, GetParam()) != nullptr, is_meaningful(data_type, reduce_op))
          << name(data_type) << " " << name(reduce_op);
      if (!is_meaningful(data_type, reduce_op)) continue;
      for (int inputs : kInputs)
        for (size_t count : kCounts) check(GetParam(), data_type, reduce_op, inputs, count), ++checked;
    }
  EXPECT_GT(checked, 5000);
}

TEST_P(ReduceKernels, EveryFloat16SurvivesTheRoundTrip) {
  std::vector<uint16_t> all(65536), result(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    const void* inputs[] = {all.data()};
    void* outputs[] = {result.data()};
    find_reduce(type, ReduceOp::kSum, 1, GetParam())({outputs, 1, inputs, 1, all.size(), nullptr});
    const uint16_t infinity = type == DataType::kFloat16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool nan = (all[i] & 0x7fff) > infinity;
      ASSERT_TRUE(nan ? (result[i] & 0x7fff) > infinity : result[i] == all[i]) << all[i] << " became " << result[i];
    }
  }
}

TEST_P(ReduceKernels, Float16HasTheBitsOfTheBaseline) {
  // Sums that fall between float16 numbers, overflow, underflow and cancel; NaN payloads included.
  std::mt19937 random(7);
  std::vector<uint16_t> a(1 << 18), b(1 << 18), expected(1 << 18), result(1 << 18);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint16_t>(random()), b[i] = static_cast<uint16_t>(random());
  const void* inputs[] = {a.data(), b.data()};
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kProduct, ReduceOp::kMax}) {
    void* outputs[] = {expected.data()};
    find_reduce(DataType::kFloat16, op, 2, InstructionSet::kBaseline)({outputs, 1, inputs, 2, a.size(), nullptr});
    outputs[0] = result.data();
    find_reduce(DataType::kFloat16, op, 2, GetParam())({outputs, 1, inputs, 2, a.size(), nullptr});
    for (size_t i = 0; i < a.size(); ++i) {
      const bool nan = (expected[i] & 0x7fff) > 0x7c00;
      ASSERT_TRUE(nan ? (result[i] & 0x7fff) > 0x7c00 : result[i] == expected[i])
          << a[i] << " " << name(op) << " " << b[i];
    }
  }
}

TEST_P(ReduceKernels, SumsOfAlignedBlocksArePartsOfTheSum) {
  // Virtual ranks rely on this: adding up ranks 4k to 4k + 3 beforehand changes no bit.
  constexpr size_t kCount = 1000;
  const auto sum_of = [](const std::vector<std::vector<std::byte>>& data, size_t first, size_t count) {
    std::vector<const void*> inputs;
    for (size_t i = first; i < first + count; ++i) inputs.push_back(data[i].data());
    std::vector<std::byte> result(data[0].size());
    void* outputs[] = {result.data()};
    const auto n = static_cast<int>(count);
    find_reduce(DataType::kFloat32, ReduceOp::kSum, n, GetParam())({outputs, 1, inputs.data(), n, kCount, nullptr});
    return result;
  };
  for (size_t all : {size_t{5}, size_t{8}, size_t{12}, size_t{13}})
    for (size_t block : {size_t{2}, size_t{4}}) {
      std::vector<std::vector<std::byte>> data, blocks;
      for (size_t i = 0; i < all; ++i)
        data.push_back(random_elements(DataType::kFloat32, ReduceOp::kSum, kCount, static_cast<unsigned>(i)));
      for (size_t first = 0; first < all; first += block)
        blocks.push_back(sum_of(data, first, std::min(block, all - first)));
      EXPECT_EQ(sum_of(blocks, 0, blocks.size()), sum_of(data, 0, all)) << all << " in blocks of " << block;
    }
}

TEST_P(ReduceKernels, NanIsNotLostByMinAndMax) {
  const float nan = std::nanf("");
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    std::vector<float> a{nan, 1, 2}, b{1, nan, 3}, out(3);
    const void* inputs[] = {a.data(), b.data()};
    void* outputs[] = {out.data()};
    find_reduce(DataType::kFloat32, op, 2, GetParam())({outputs, 1, inputs, 2, 3, nullptr});
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1])) << name(op);
    EXPECT_EQ(out[2], op == ReduceOp::kMin ? 2 : 3);
  }
}

#ifdef __aarch64__
constexpr InstructionSet kSets[] = {InstructionSet::kBaseline, InstructionSet::kNeon};
#else
constexpr InstructionSet kSets[] = {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512};
#endif
INSTANTIATE_TEST_SUITE_P(Sets, ReduceKernels, ::testing::ValuesIn(kSets), [](const auto& set) {
  return std::string(set.param == InstructionSet::kBaseline ? "Baseline"
                     : set.param == InstructionSet::kAvx2   ? "Avx2"
                     : set.param == InstructionSet::kAvx512 ? "Avx512"
                                                            : "Neon");
});

}  // namespace
}  // namespace lockstep::shm
