#include <gtest/gtest.h>

#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>
#include <lockstep/sync_batch_norm.h>

#include "data_parallel/models.h"
#include "support/complaint.h"
#include "support/ranks.h"

// One layer on several ranks against torch's batch norm on the whole batch in one process.

namespace lockstep::sync_batch_norm_test {
namespace {

using namespace testing;  // NOLINT
using torch::nn::BatchNormOptions;

enum class Split { kEven, kUneven, kEmpty };

int64_t samples_of(Split split, int rank) {
  if (split == Split::kEven) return 4;
  if (split == Split::kUneven) return 2 + 3 * rank;
  return rank == 0 ? 0 : 6 - rank;  // 0, 5, 4
}

struct Case {
  Engine engine;
  Split split;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << name_of(c.engine) << static_cast<int>(c.split); }
};

class SyncBatchNormTest : public ::testing::TestWithParam<Case> {};

std::vector<Case> all_cases() {
  std::vector<Case> cases{{{1, ""}, Split::kEven}};
  for (const char* backend : {"shm", "gloo"})
    for (int world_size : {2, 3})
      for (Split split : {Split::kEven, Split::kUneven, Split::kEmpty}) cases.push_back({{world_size, backend}, split});
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  static const std::vector<std::string> kSplits{"even", "uneven", "empty"};
  return name_of(info.param.engine) + "_" + kSplits[static_cast<size_t>(info.param.split)];
}

INSTANTIATE_TEST_SUITE_P(Splits, SyncBatchNormTest, ::testing::ValuesIn(all_cases()), case_name);

/// The position of a rank's samples in the whole batch.
struct Share {
  int64_t first = 0, count = 0, total = 0;
};

Share share_of(Split split, const Context& context) {
  Share share;
  for (int rank = 0; rank < context.world_size(); ++rank) {
    if (rank == context.rank()) share.first = share.total;
    share.total += samples_of(split, rank);
  }
  share.count = samples_of(split, context.rank());
  return share;
}

/// Relative to the largest number, or absolute if all are below 1.
double largest_difference(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.numel() == 0) return 0;
  const at::Tensor a = actual.to(at::kDouble), b = expected.to(at::kDouble);
  return (a - b).abs().max().item<double>() / std::max(1.0, b.abs().max().item<double>());
}

void randomize(torch::nn::Module& layer) {
  at::NoGradGuard no_grad;
  int key = 50;
  for (auto& parameter : layer.parameters()) parameter.copy_(formula(parameter.sizes(), ++key) + 1);
}

/// Runs both layers on the same numbers, for a few steps in training and once in eval(), and compares everything.
template <typename Layer, typename Reference>
void compare(const Context& context, Layer& layer, Reference& reference, Split split, std::vector<int64_t> shape,
             at::ScalarType dtype, double tolerance, double tolerance_of_parameters,
             at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  randomize(*layer);
  randomize(*reference);
  const Share share = share_of(split, context);
  shape[0] = share.total;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor whole = (formula(shape, step) * 4 + 3).to(dtype).to(format).requires_grad_();
    const at::Tensor weights = formula(shape, step + 0.5).to(dtype);
    const at::Tensor own = whole.detach().narrow(0, share.first, share.count).clone(format).requires_grad_();
    const at::Tensor output = layer->forward(own), expected = reference->forward(whole);
    EXPECT_EQ(output.scalar_type(), dtype);
    EXPECT_LE(largest_difference(output, expected.narrow(0, share.first, share.count)), tolerance);
    (output * weights.narrow(0, share.first, share.count)).sum().backward();
    (expected * weights).sum().backward();
    EXPECT_LE(largest_difference(own.grad(), whole.grad().narrow(0, share.first, share.count)), tolerance);
  }
  const auto expected = reference->named_parameters();
  for (const auto& item : layer->named_parameters()) {
    const at::Tensor gradient = item.value().grad().clone();
    context.group().all_reduce(gradient);
    EXPECT_LE(largest_difference(gradient, expected[item.key()].grad()), tolerance_of_parameters) << item.key();
  }
  const auto buffers = reference->named_buffers();
  EXPECT_EQ(layer->named_buffers().keys(), buffers.keys());
  for (const auto& item : layer->named_buffers())
    EXPECT_LE(largest_difference(item.value(), buffers[item.key()]), tolerance_of_parameters) << item.key();
  layer->eval();
  reference->eval();
  const at::Tensor alone = formula(shape, 9).to(dtype);
  EXPECT_LE(largest_difference(layer->forward(alone), reference->forward(alone)), tolerance);
}

TEST_P(SyncBatchNormTest, AConvertedLayerIsBatchNormOfTheWholeBatch) {
  const auto [engine, split] = GetParam();
  run_ranks(engine, [split = split](Context& context) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-13;
      for (const auto& momentum : {std::optional<double>(0.1), std::optional<double>()}) {
        const auto options = BatchNormOptions(5).momentum(momentum);
        torch::nn::BatchNorm1d one(options), whole_one(options);
        torch::nn::BatchNorm2d two(options), whole_two(options), last(options), whole_last(options);
        torch::nn::BatchNorm3d three(options), whole_three(options);
        for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{
                 &*one, &*two, &*last, &*three, &*whole_one, &*whole_two, &*whole_last, &*whole_three})
          module->to(dtype);
        for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{&*one, &*two, &*last, &*three})
          EXPECT_EQ(convert_sync_batchnorm(*module, context.group()), 1);
        compare(context, one, whole_one, split, {0, 5}, dtype, tolerance, 10 * tolerance);
        compare(context, two, whole_two, split, {0, 5, 3, 2}, dtype, tolerance, 10 * tolerance);
        compare(context, last, whole_last, split, {0, 5, 3, 2}, dtype, tolerance, 10 * tolerance,
                at::MemoryFormat::ChannelsLast);
        compare(context, three, whole_three, split, {0, 5, 2, 1, 2}, dtype, tolerance, 10 * tolerance);
      }
    }
  });
}

TEST_P(SyncBatchNormTest, ADeclaredLayerTakesEveryOption) {
  const auto [engine, split] = GetParam();
  run_ranks(engine, [split = split](Context& context) {
    for (const bool affine : {true, false})
      for (const bool track : {true, false}) {
        const auto options = BatchNormOptions(4).affine(affine).track_running_stats(track).eps(1e-3);
        SyncBatchNorm layer(options, context.group());
        torch::nn::BatchNorm1d reference(options);
        EXPECT_EQ(state_dict(*layer).keys(), state_dict(*reference).keys());
        compare(context, layer, reference, split, {0, 4, 7}, at::kFloat, 1e-6, 1e-5);
        // A copy is synchronised too.
        layer->train();
        auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(layer->clone());
        torch::nn::BatchNorm1d again(options);
        SyncBatchNorm holder(copy);
        if (track) {
          holder->reset_running_stats();
          copy->zero_grad();
        }
        compare(context, holder, again, split, {0, 4, 7}, at::kFloat, 1e-6, 1e-5);
      }
  });
}

TEST_P(SyncBatchNormTest, SixteenBitsHaveStatisticsOfThirtyTwo) {
  const auto [engine, split] = GetParam();
  run_ranks(engine, [split = split](Context& context) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const double unit = dtype == at::kHalf ? 1.0 / 1024 : 1.0 / 128;
      torch::nn::BatchNorm2d layer(5), reference(5);
      convert_sync_batchnorm(*layer, context.group());
      compare(context, layer, reference, split, {0, 5, 4, 4}, dtype, 4 * unit, 4 * unit);
      EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
      EXPECT_LE(largest_difference(layer->running_mean, reference->running_mean), 1e-6);
      EXPECT_LE(largest_difference(layer->running_var, reference->running_var), 1e-6);
    }
  });
}

struct Holders : torch::nn::Module {
  torch::nn::BatchNorm2d bn{register_module("bn", torch::nn::BatchNorm2d(3))};
  torch::nn::Sequential more{register_module(
      "more", torch::nn::Sequential(torch::nn::Conv2d(3, 2, 1), torch::nn::BatchNorm2d(2), torch::nn::ReLU()))};
};

TEST(ConvertSyncBatchNorm, LeavesTheTreeAsItWas) {
  run_ranks(2, [](Context& context) {
    Holders net;  // not owned by a shared_ptr
    const auto before = state_dict(net);
    EXPECT_EQ(convert_sync_batchnorm(net, context.group()), 2);
    EXPECT_EQ(convert_sync_batchnorm(net, context.group()), 2);
    const auto after = state_dict(net);
    EXPECT_EQ(after.keys(), before.keys());
    for (const auto& item : after) EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
    // Other layers of the program are not synchronised.
    torch::nn::BatchNorm2d other(3), plain(3);
    const at::Tensor own = formula({4, 3, 2, 2}, context.rank()).to(at::kFloat);
    EXPECT_TRUE(at::equal(other->forward(own), plain->forward(own)));
    EXPECT_GT(largest_difference(net.bn->forward(own), plain->forward(own)), 1e-3);
    // Moving to double and loading a state keep the tensors, so the layer stays synchronised.
    net.to(at::kDouble);
    const at::Tensor wide = own.to(at::kDouble);
    plain->to(at::kDouble);
    load_state_dict(net, state_dict(net));
    EXPECT_GT(largest_difference(net.bn->forward(wide), plain->forward(wide)), 1e-3);
  });
}

struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
  using torch::nn::BatchNorm1dImpl::BatchNorm1dImpl;
};
TORCH_MODULE(OwnNorm);

TEST(ConvertSyncBatchNorm, RefusesWhatItCannotDo) {
  run_ranks(2, [](Context& context) {
    torch::nn::Sequential net(torch::nn::Linear(2, 4), torch::nn::BatchNorm1d(4), OwnNorm(4),
                              torch::nn::BatchNorm1d(BatchNormOptions(4).affine(false).track_running_stats(false)));
    const std::string text = complaint([&] { convert_sync_batchnorm(*net, context.group()); });
    for (const char* part : {"nothing was converted", "2 is of a class derived from BatchNorm",
                             "3 has neither parameters nor running statistics"})
      EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
    torch::nn::Sequential without(torch::nn::Linear(2, 4), torch::nn::InstanceNorm1d(4));
    EXPECT_EQ(convert_sync_batchnorm(*without, context.group()), 0);
    // Nothing was converted: ranks would wait for each other here.
    if (context.rank() == 0) net[1]->as<torch::nn::BatchNorm1d>()->forward(at::rand({3, 4}));
  });
}

/// As PyTorch's: a model without batch norm is a model with nothing to convert, virtual ranks or not.
TEST(ConvertSyncBatchNorm, LeavesAModelWithoutBatchNormAsItIs) {
  run_ranks(2, [](Context& context) {
    torch::nn::Sequential without(torch::nn::Linear(2, 4));
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(convert_sync_batchnorm(*without, context.group()), 0);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(
        said.find("has no BatchNorm1d, BatchNorm2d or BatchNorm3d, so nothing was converted") != std::string::npos,
        context.rank() == 0)
        << said;
  });
}

TEST(ConvertSyncBatchNorm, IsAnErrorOnAllRanksIfOneHasOtherLayers) {
  for (const int ranks : {2, 3})
    run_ranks(ranks, [](Context& context) {
      torch::nn::Sequential net(torch::nn::Linear(2, 4));
      if (context.rank() == 1) net->push_back(torch::nn::BatchNorm1d(4));
      std::string text;
      try {
        convert_sync_batchnorm(*net, context.group());
      } catch (const Error& error) {  // ranks disagree: not misuse by one of them
        text = error.what();
      }
      EXPECT_NE(text.find("the module of rank 1 has 1 batch norms, and that of rank 0 has 0"), std::string::npos)
          << text;
    });
}

TEST(SyncBatchNormAtTheEdge, OneValueOnEachOfTwoRanksIsEnoughAndOneInAllIsNot) {
  run_ranks(2, [](Context& context) {
    SyncBatchNorm layer(BatchNormOptions(3), context.group());
    const at::Tensor input = at::full({1, 3}, context.rank() * 2.0);
    EXPECT_TRUE(at::allclose(layer->forward(input), at::full({1, 3}, context.rank() * 2.0 - 1), 1e-4, 1e-4));
    const std::string text = complaint([&] { layer->forward(at::ones({context.rank(), 3})); });
    EXPECT_NE(text.find("more than 1 value per channel"), std::string::npos) << text;
    // No rank has samples: nothing is learned.
    const at::Tensor mean = layer->running_mean.clone();
    const at::Tensor nothing = at::ones({0, 3}).requires_grad_();
    layer->forward(nothing).sum().backward();
    EXPECT_TRUE(at::equal(layer->running_mean, mean));
    EXPECT_TRUE(at::equal(layer->weight.grad(), at::zeros({3})));
  });
}

TEST(SyncBatchNormAtTheEdge, ASecondDerivativeIsRefused) {
  run_ranks(2, [](Context& context) {
    SyncBatchNorm layer(BatchNormOptions(3), context.group());
    const at::Tensor input = at::rand({4, 3}).requires_grad_();
    const at::Tensor loss = layer->forward(input).square().sum();
    EXPECT_NE(
        complaint([&] { torch::autograd::grad({loss}, {input}, {}, {}, /*create_graph=*/true); }).find("create_graph"),
        std::string::npos);
  });
}

/// Large means would cancel in E[x^2] - E[x]^2.
TEST(SyncBatchNormAtTheEdge, ALargeMeanDoesNotCancel) {
  run_ranks(3, [](Context& context) {
    SyncBatchNorm layer(BatchNormOptions(2), context.group());
    const at::Tensor whole = formula({9, 2}, 3).to(at::kFloat) + 4096;
    const at::Tensor exact = whole.to(at::kDouble);
    layer->forward(whole.narrow(0, 3 * context.rank(), 3));
    const at::Tensor var = exact.var(0, /*unbiased=*/true);
    // Floats near 4096 are 0.0005 apart, so a rank's mean is off by that much; a difference of squares would be off
    // by 1.
    EXPECT_LE(largest_difference(layer->running_var, var * 0.1 + 0.9), 1e-5);
  });
}

TEST(SyncBatchNormAtTheEdge, AfterItsContextItSaysSo) {
  run_ranks(2, [](Context& context) {
    torch::nn::BatchNorm1d layer(3);
    convert_sync_batchnorm(*layer, context.group());
    { const Context ends = std::move(context); }
    const std::string text = complaint([&] { layer->forward(at::rand({4, 3})); });
    EXPECT_NE(text.find("its Context was destroyed"), std::string::npos) << text;
    layer->eval();
    EXPECT_EQ(layer->forward(at::rand({4, 3})).size(0), 4);
  });
}

}  // namespace
}  // namespace lockstep::sync_batch_norm_test
