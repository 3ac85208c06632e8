// What machines send each other: bounds of its errors, and the numbers at the ends of the range.

#include "diloco/wire_format.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace lockstep::diloco {
namespace {

constexpr Wire kAll[] = {Wire::kFloat32, Wire::kBFloat16, Wire::kInt8, Wire::kInt4};
constexpr float kLargest = std::numeric_limits<float>::max(), kSubnormal = std::numeric_limits<float>::denorm_min();

std::vector<float> round_trip(Wire wire, const std::vector<float>& values) {
  const auto elements = static_cast<int64_t>(values.size());
  // Canaries behind both ends.
  std::vector<uint8_t> bytes(static_cast<size_t>(encoded_bytes(wire, elements)) + 1, 0xa5);
  std::vector<float> decoded(values.size() + 1, 42);
  encode(wire, values.data(), elements, bytes.data());
  EXPECT_EQ(bytes.back(), 0xa5);
  decode(wire, bytes.data(), elements, decoded.data());
  EXPECT_EQ(decoded.back(), 42);
  decoded.pop_back();
  return decoded;
}

/// Half a step of the block in which number `i` is, by the definition in <lockstep/diloco.h>.
double half_step(Wire wire, const std::vector<float>& values, size_t i) {
  if (wire == Wire::kFloat32) return 0;
  // 8 bits of mantissa; below the smallest normal number steps are as wide as there.
  if (wire == Wire::kBFloat16)
    return std::max(std::ldexp(std::fabs(static_cast<double>(values[i])), -8), std::ldexp(1.0, -134));
  double largest = 0;
  for (size_t at = i / kBlock * kBlock; at < std::min(values.size(), (i / kBlock + 1) * kBlock); ++at)
    largest = std::max(largest, std::fabs(static_cast<double>(values[at])));
  const double step = largest / (wire == Wire::kInt8 ? 127 : 7);
  // The scale has 8 bits, and below the smallest normal number steps of 2^-133.
  return std::max(step * (1 + std::ldexp(1.0, -7)), step + std::ldexp(1.0, -133)) / 2 * (1 + 1e-6);
}

TEST(WireFormat, EveryNumberIsWithinHalfAStep) {
  std::mt19937 random(1);
  for (const Wire wire : kAll)
    for (const size_t elements : {size_t{0}, size_t{1}, size_t{2}, size_t{63}, size_t{64}, size_t{65}, size_t{127},
                                  size_t{129}, size_t{1000}, size_t{4099}})
      for (const int exponent : {-149, -140, -130, -126, -100, -20, 0, 20, 100, 126}) {
        std::vector<float> values(elements);
        for (float& value : values)
          value = std::ldexp(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31F,
                             exponent + static_cast<int>(random() % 3));
        const std::vector<float> decoded = round_trip(wire, values);
        for (size_t i = 0; i < elements; ++i)
          ASSERT_LE(std::fabs(static_cast<double>(decoded[i]) - values[i]), half_step(wire, values, i))
              << name_of(wire) << ' ' << values[i] << " became " << decoded[i] << " of " << elements;
      }
}

TEST(WireFormat, ZerosAreExact) {
  for (const Wire wire : kAll) {
    std::vector<float> values(200);
    EXPECT_EQ(round_trip(wire, values), values);
    values[70] = 3, values[199] = -1e-30F;
    const std::vector<float> decoded = round_trip(wire, values);
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(values[i] != 0 || decoded[i] == 0) << name_of(wire);
  }
}

TEST(WireFormat, ExtremesStayFinite) {
  for (const Wire wire : kAll) {
    const std::vector<float> values = {kLargest, -kLargest, 1, kLargest / 2, -kLargest / 3, kSubnormal};
    const std::vector<float> decoded = round_trip(wire, values);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(std::isfinite(decoded[i])) << name_of(wire);
      EXPECT_LE(std::fabs(static_cast<double>(decoded[i]) - values[i]), half_step(wire, values, i)) << name_of(wire);
    }
    EXPECT_EQ(std::signbit(decoded[1]), true);
  }
}

TEST(WireFormat, SubnormalsNeitherDivideByZeroNorVanishInFloat) {
  for (const Wire wire : kAll) {
    const std::vector<float> values = {kSubnormal, -kSubnormal, 5 * kSubnormal, 0};
    for (const float decoded : round_trip(wire, values)) EXPECT_LE(std::fabs(decoded), 0x1p-132F) << name_of(wire);
  }
  EXPECT_EQ(round_trip(Wire::kFloat32, {kSubnormal}), std::vector<float>{kSubnormal});
}

TEST(WireFormat, LargestOfABlockIsHitAndBlocksAreApart) {
  for (const Wire wire : {Wire::kInt8, Wire::kInt4}) {
    std::vector<float> values(130, 1);
    for (size_t i = 64; i < 128; ++i) values[i] = 1e-20F;
    values[128] = values[129] = -1e20F;
    const std::vector<float> decoded = round_trip(wire, values);
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(decoded[i] / values[i], 1, 1.0 / 128) << name_of(wire) << i;
  }
}

TEST(WireFormat, BFloat16RoundsToNearestEven) {
  const auto of = [](uint32_t bits) {
    return std::bit_cast<uint32_t>(round_trip(Wire::kBFloat16, {std::bit_cast<float>(bits)})[0]);
  };
  EXPECT_EQ(of(0x3f808000), 0x3f800000U);
  EXPECT_EQ(of(0x3f818000), 0x3f820000U);
  EXPECT_EQ(of(0x3f808001), 0x3f810000U);
  EXPECT_EQ(of(0xbf818000), 0xbf820000U);
  EXPECT_EQ(of(0x80000000), 0x80000000U);
}

TEST(WireFormat, BytesAreCounted) {
  EXPECT_EQ(encoded_bytes(Wire::kFloat32, 65), 260);
  EXPECT_EQ(encoded_bytes(Wire::kBFloat16, 65), 130);
  EXPECT_EQ(encoded_bytes(Wire::kInt8, 65), 2 * 2 + 65);
  EXPECT_EQ(encoded_bytes(Wire::kInt4, 65), 2 * 2 + 33);
  EXPECT_EQ(encoded_bytes(Wire::kInt4, 0), 0);
}

/// The sum of all that is decoded and of the last rest is the sum of all values.
TEST(WireFormat, RestsMakeUpForRounding) {
  std::mt19937 random(2);
  for (const Wire wire : kAll) {
    constexpr size_t kElements = 333;
    std::vector<float> rest(kElements), sum(kElements), decoded(kElements);
    std::vector<double> given(kElements), taken(kElements);
    std::vector<uint8_t> bytes(static_cast<size_t>(encoded_bytes(wire, kElements)));
    double lost = 0;
    for (int round = 0; round < 50; ++round) {
      for (size_t i = 0; i < kElements; ++i) {
        const float value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31F + 0.01F;
        given[i] += value;
        sum[i] = value + rest[i];
      }
      encode_with_rest(wire, sum.data(), kElements, bytes.data(), rest.data());
      decode(wire, bytes.data(), kElements, decoded.data());
      for (size_t i = 0; i < kElements; ++i) taken[i] += decoded[i];
      for (const float one : rest) lost += std::fabs(one);
    }
    EXPECT_EQ(lost > 0, wire != Wire::kFloat32);
    for (size_t i = 0; i < kElements; ++i) ASSERT_NEAR(taken[i] + rest[i], given[i], 1e-5) << name_of(wire);
  }
}

}  // namespace
}  // namespace lockstep::diloco
