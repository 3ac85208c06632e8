#include <algorithm>
#include <vector>

#include "base/environment.h"
#include "exact/training.h"

// The same bits on any number of ranks. With as many ranks as virtual ranks each rank is one, and gradients go through
// the group's own reduction: that is the run that the others are compared with, where it is among them.

namespace lockstep::exact {
namespace {

bool nightly() { return Environment::from_process().lockstep_nightly.has_value(); }

/// "" if they are equal, else the first line that is not, in both.
std::string difference(const std::string& a, const std::string& b) {
  std::istringstream left(a), right(b);
  for (std::string one, other;;) {
    const bool more = static_cast<bool>(std::getline(left, one)), both = static_cast<bool>(std::getline(right, other));
    if (!more && !both) return "";
    if (more != both || one != other) return one + " / " + other;
  }
}

void expect_equal_on(const std::vector<int>& numbers, const Case& one) {
  const std::string expected = run_on(numbers.front(), one);
  ASSERT_NE(expected, "") << one.name;
  for (size_t i = 1; i < numbers.size(); ++i)
    EXPECT_EQ(difference(run_on(numbers[i], one), expected), "")
        << one.name << ", " << one.virtual_ranks << " virtual ranks on " << numbers[i] << " and on " << numbers.front()
        << " ranks";
}

/// 1 to 4 ranks, and as many as virtual ranks where that is few enough.
std::vector<int> all_numbers(int virtual_ranks) {
  std::vector<int> numbers;
  if (virtual_ranks <= 8 || nightly()) numbers.push_back(virtual_ranks);
  for (int ranks = 1; ranks <= std::min(4, virtual_ranks); ++ranks)
    if (ranks != virtual_ranks) numbers.push_back(ranks);
  return numbers;
}

class Exact : public ::testing::TestWithParam<Case> {};
TEST_P(Exact, SameBitsOnAnyNumberOfRanks) {
  const Case& one = GetParam();
  expect_equal_on(nightly()                ? all_numbers(one.virtual_ranks)
                  : one.virtual_ranks <= 3 ? all_numbers(one.virtual_ranks)
                                           : std::vector<int>{2, 1, 3},
                  one);
}

std::vector<Case> shapes() {
  std::vector<Case> cases;
  for (const int virtual_ranks : {1, 2, 3, 6, 8, 12})
    for (const Kind kind : {Kind::kMlp, Kind::kResNet, Kind::kTransformer})
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        // Each pair of them in CI, each triple at night.
        const bool chosen = (virtual_ranks / 2 + static_cast<int>(kind)) % 2 == (dtype == at::kFloat ? 0 : 1);
        if (!chosen && !nightly()) continue;
        const char* names[] = {"Mlp", "ResNet", "Transformer"};
        cases.push_back({.name = std::string(names[static_cast<int>(kind)]) + (dtype == at::kFloat ? "Fp32" : "Bf16") +
                                 std::to_string(virtual_ranks),
                         .virtual_ranks = virtual_ranks,
                         .kind = kind,
                         .dtype = dtype,
                         .adamw = dtype == at::kFloat});
      }
  return cases;
}
const auto name_of_case = [](const auto& instance) { return instance.param.name; };
INSTANTIATE_TEST_SUITE_P(Shapes, Exact, ::testing::ValuesIn(shapes()), name_of_case);

const Case kOptions[] = {
    {.name = "Accumulation", .virtual_ranks = 3, .accumulate = 3, .steps = 6},
    {.name = "Weights", .virtual_ranks = 3, .weighted = true},
    {.name = "WeightsInBf16", .virtual_ranks = 6, .dtype = at::kBFloat16, .weighted = true},
    {.name = "UnusedParameters", .virtual_ranks = 3, .unused = true, .adamw = true},
    {.name = "UnusedParametersOfSix", .virtual_ranks = 6, .dtype = at::kBFloat16, .unused = true},
    {.name = "Sums", .virtual_ranks = 3, .reduction = GradientReduction::kSum},
    {.name = "Averages", .virtual_ranks = 3, .adamw = true, .ema = true},
    {.name = "Clipping", .virtual_ranks = 3, .clip = true},
    {.name = "SkippedBatches", .virtual_ranks = 3, .kind = Kind::kResNet, .skip = true},
    {.name = "GradientsThatAreKept", .virtual_ranks = 3, .unused = true, .keeps_gradients = true},
    {.name = "SumsOnTop",
     .virtual_ranks = 3,
     .unused = true,
     .keeps_gradients = true,
     .reduction = GradientReduction::kSum},
    {.name = "Fp16Hook", .virtual_ranks = 3, .hook = [] { return fp16_compress_hook(); }},
    {.name = "Bf16HookOfSix", .virtual_ranks = 6, .weighted = true, .hook = [] { return bf16_compress_hook(); }},
    {.name = "ShardedOptimizer", .virtual_ranks = 3, .sharded = true},
};
INSTANTIATE_TEST_SUITE_P(Options, Exact, ::testing::ValuesIn(kOptions), name_of_case);

// For make test-thorough: more ranks, and every option where each of 1, 2 and 3 ranks works for several virtual ranks.
class ExactOnMore : public Exact {};
TEST_P(ExactOnMore, SameBits) {
  const Case& one = GetParam();
  std::vector<int> numbers = {one.virtual_ranks <= 3 ? one.virtual_ranks : 4, 1};
  if (one.virtual_ranks == 8) numbers.push_back(8);
  expect_equal_on(numbers, one);
}

std::vector<Case> networks_on_more() {
  std::vector<Case> cases;
  for (const Case& one : shapes())
    if (one.kind == Kind::kMlp) cases.push_back(one);
  const Case resnet{.name = "ResNetBf16Of8", .virtual_ranks = 8, .kind = Kind::kResNet, .dtype = at::kBFloat16};
  const Case transformer{.name = "TransformerFp32Of8", .virtual_ranks = 8, .kind = Kind::kTransformer, .adamw = true};
  cases.insert(cases.end(), {resnet, transformer});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Networks, ExactOnMore, ::testing::ValuesIn(networks_on_more()), name_of_case);

class ExactOfSix : public Exact {};
TEST_P(ExactOfSix, SameBits) { expect_equal_on({1, 2, 3}, GetParam()); }

std::vector<Case> options_of_six() {
  std::vector<Case> cases;
  for (Case one : kOptions) {
    if (one.virtual_ranks == 6) continue;
    one.virtual_ranks = 6;
    cases.push_back(one);
    one.backend = "gloo";
    one.name += "OverGloo";
    const bool travels_otherwise = one.accumulate > 1 || one.weighted || one.unused || one.sharded;
    if (travels_otherwise) cases.push_back(one);
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    cases.push_back({.name = dtype == at::kFloat ? "Fp32OverGloo" : "Bf16OverGloo",
                     .virtual_ranks = 6,
                     .kind = Kind::kResNet,
                     .dtype = dtype,
                     .backend = "gloo"});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Options, ExactOfSix, ::testing::ValuesIn(options_of_six()), name_of_case);

}  // namespace
}  // namespace lockstep::exact
