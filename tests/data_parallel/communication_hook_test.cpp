#include <lockstep/comm_hook.h>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "support/ranks.h"

namespace lockstep::communication_hook_test {
namespace {

using namespace testing;  // NOLINT

CommHookPtr make_hook(const std::string& name) {
  if (name == "fp16") return fp16_compress_hook();
  if (name == "bf16") return bf16_compress_hook();
  if (name == "power_sgd") return power_sgd_hook({.start_iter = 2});
  if (name == "power_sgd_rank2")
    return power_sgd_hook({.matrix_approximation_rank = 2, .start_iter = 2, .min_compression_rate = 0.5});
  if (name == "power_sgd_rank3")
    return power_sgd_hook(
        {.matrix_approximation_rank = 3, .start_iter = 2, .min_compression_rate = 0.3, .random_seed = 7});
  if (name == "power_sgd_bare")
    return power_sgd_hook(
        {.start_iter = 2, .use_error_feedback = false, .warm_start = false, .orthogonalization_epsilon = 1e-3});
  if (name == "post_local_sgd") return post_local_sgd_hook({.start_iter = 4});
  return nullptr;
}

// --- against PyTorch's own hooks -------------------------------------------------------------------------------------

struct Case {
  std::string hook;
  Engine engine;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.hook << " " << name_of(c.engine); }
};

class GoldenHook : public ::testing::TestWithParam<Case> {};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* hook :
       {"fp16", "bf16", "power_sgd", "power_sgd_rank2", "power_sgd_rank3", "power_sgd_bare", "post_local_sgd"})
    for (const char* backend : {"shm", "gloo"})
      for (int world_size : {2, 3}) cases.push_back({hook, {world_size, backend}});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(PyTorch, GoldenHook, ::testing::ValuesIn(all_cases()), [](const auto& instance) {
  return instance.param.hook + "_" + name_of(instance.param.engine);
});

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance, const std::string& name) {
  EXPECT_TRUE(at::allclose(actual.detach(), expected, tolerance, tolerance)) << name << "\n"
                                                                             << actual << "\nPyTorch has\n"
                                                                             << expected;
}

TEST_P(GoldenHook, GradientsOfTheFifthStepAndWeightsAfterTwenty) {
  const Case& c = GetParam();
  run_ranks(c.engine, [&c](Context& context) {
    const StateDict golden = load(LOCKSTEP_SOURCE_DIR "/tests/golden/hooks.safetensors").tensors;
    const std::string place = c.hook + "/" + std::to_string(c.engine.world_size) + "/";
    // In half precision, the order of additions and divisions decides how often results are rounded.
    const double tolerance = c.hook == "fp16" ? 1e-3 : c.hook == "bf16" ? 8e-3 : 2e-5;
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    replica.register_comm_hook(make_hook(c.hook));
    PeriodicModelAverager averager(context.group(), 3, 4);
    auto optimizer = make_sgd(*model);
    const int rank = context.rank();
    // After the fourth step of post-local SGD the ranks differ.
    const std::string whose = c.hook == "post_local_sgd" ? "_on_" + std::to_string(rank) : "";
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      loss_of(*model, batch(step, rank), step, rank).backward();
      const StateDict expected = without_prefix(place + "grad" + whose + "/", golden);
      EXPECT_EQ(expected.size(), 4u);
      if (step == 4)
        for (const auto& item : expected)
          expect_close(model->named_parameters()[item.key()].grad(), item.value(), tolerance, "gradient " + item.key());
      optimizer.step();
      if (c.hook == "post_local_sgd") averager.average_parameters(model->parameters());
    }
    const StateDict expected = without_prefix(place + "after" + whose + "/", golden);
    EXPECT_EQ(expected.size(), 4u);
    for (const auto& item : expected)
      expect_close(model->named_parameters()[item.key()], item.value(), tolerance, item.key());
  });
}

// --- against formulas ------------------------------------------------------------------------------------------------

class Hooks : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, Hooks, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

/// A bucket of one 12 x 10 matrix and a vector of 5, with different values on every rank and in every step.
struct OneBucket {
  explicit OneBucket(ReduceOp op, at::ScalarType dtype = at::kDouble) : flat(at::zeros({125}, dtype)) {
    bucket = {0, true, op, flat, {flat.narrow(0, 0, 120).view({12, 10}), flat.narrow(0, 120, 5)}};
  }
  at::Tensor fill(int step, int rank) const { return flat.copy_(formula({125}, step * 10 + rank)); }
  at::Tensor flat;
  GradientBucket bucket;
};

at::Tensor sum_of_ranks(int step, int ranks) {
  at::Tensor sum = at::zeros({125}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum += formula({125}, step * 10 + rank);
  return sum;
}

void expect_equal_on_all_ranks(const Context& context, const at::Tensor& tensor) {
  StateDict state;
  state.insert("tensor", tensor);
  const auto all = context.group().all_gather_bytes(hash(state));
  for (const auto& other : all) EXPECT_EQ(other, all[0]);
}

/// The sum of this rank's errors in the hook's state, in the bucket's layout.
at::Tensor error_in(const StateDict& state) {
  at::Tensor error = at::zeros({125}, at::kDouble);
  for (const auto& item : state)
    if (item.key().starts_with("error.")) error.narrow(0, 0, item.value().numel()).add_(item.value().flatten());
  return error;
}

TEST_P(Hooks, ErrorFeedbackLosesNothing) {
  // What the results of all steps are short of the sum of all gradients is in the ranks' errors.
  run_ranks(GetParam(), [](Context& context) {
    const int ranks = context.world_size(), rank = context.rank();
    for (const auto& make : {+[] { return power_sgd_hook({.start_iter = 1}); },
                             +[] { return top_k_hook({.density = 0.1, .start_iter = 1}); }})
      for (const ReduceOp op : {ReduceOp::kMean, ReduceOp::kSum}) {
        const CommHookPtr hook = make();
        const double share = op == ReduceOp::kMean ? 1.0 / ranks : 1;
        const OneBucket one(op);
        at::Tensor results = at::zeros({125}, at::kDouble), gradients = results.clone();
        double lost = 0;
        for (int step = 0; step < 6; ++step) {
          one.fill(step, rank);
          hook->reduce(one.bucket, context.group())();
          expect_equal_on_all_ranks(context, one.flat);
          results += one.flat;
          gradients += sum_of_ranks(step, ranks) * share;
          lost = std::max(lost, (one.flat - sum_of_ranks(step, ranks) * share).abs().max().item<double>());
        }
        at::Tensor remembered = error_in(hook->state_dict());
        context.group().all_reduce(remembered);
        EXPECT_TRUE(at::allclose(results + remembered * share, gradients, 1e-9, 1e-9));
        EXPECT_GT(lost, 0.05) << "nothing was compressed";
      }
  });
}

TEST_P(Hooks, PowerSgdIsExactWhereTheRankSuffices) {
  run_ranks(GetParam(), [](Context& context) {
    const CommHookPtr hook =
        power_sgd_hook({.matrix_approximation_rank = 3, .start_iter = 0, .min_compression_rate = 1});
    const OneBucket one(ReduceOp::kMean);
    at::Tensor expected = at::zeros({12, 10}, at::kDouble);
    for (int rank = 0; rank < context.world_size();
         ++rank) {  // each rank's matrix has rank 1, so the mean has at most rank 3
      const at::Tensor outer = formula({12, 1}, rank).matmul(formula({1, 10}, rank + 50));
      if (rank == context.rank()) one.bucket.parts[0].copy_(outer), one.bucket.parts[1].fill_(rank);
      expected += outer / context.world_size();
    }
    hook->reduce(one.bucket, context.group())();
    EXPECT_TRUE(at::allclose(one.bucket.parts[0], expected, 1e-9, 1e-12));
    EXPECT_TRUE(at::allclose(one.bucket.parts[1], at::full({5}, (context.world_size() - 1) / 2.0, at::kDouble)));
  });
}

TEST_P(Hooks, PowerSgdSurvivesZeroGradients) {
  run_ranks(GetParam(), [](Context& context) {
    const CommHookPtr hook = power_sgd_hook({.matrix_approximation_rank = 2, .start_iter = 0});
    const OneBucket one(ReduceOp::kMean);
    for (int step = 0; step < 3; ++step) {
      one.flat.zero_();
      hook->reduce(one.bucket, context.group())();
      EXPECT_EQ(one.flat.abs().max().item<double>(), 0);
    }
    one.fill(1, context.rank());
    hook->reduce(one.bucket, context.group())();
    EXPECT_TRUE(at::isfinite(one.flat).all().item<bool>());
  });
}

TEST_P(Hooks, TopKSendsTheLargest) {
  run_ranks(GetParam(), [](Context& context) {
    const CommHookPtr hook = top_k_hook({.density = 0.02, .use_error_feedback = false});
    const OneBucket one(ReduceOp::kSum);
    at::Tensor expected = at::zeros({125}, at::kDouble);
    for (int rank = 0; rank < context.world_size(); ++rank) {
      const at::Tensor gradient = formula({125}, rank);
      const at::Tensor places = std::get<1>(gradient.abs().sort(0, /*descending=*/true)).narrow(0, 0, 3);  // 2 % of 125
      expected.index_add_(0, places, gradient.index_select(0, places));
    }
    one.fill(0, context.rank());
    hook->reduce(one.bucket, context.group())();
    EXPECT_TRUE(at::equal(one.flat, expected));
    EXPECT_TRUE(hook->state_dict().size() == 1u);
  });
}

TEST_P(Hooks, HalfPrecisionTravels) {
  run_ranks(GetParam(), [](Context& context) {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const CommHookPtr hook = dtype == at::kHalf ? fp16_compress_hook() : bf16_compress_hook();
      const OneBucket one(ReduceOp::kMean, at::kFloat);
      one.fill(0, context.rank());
      hook->reduce(one.bucket, context.group())();
      expect_equal_on_all_ranks(context, one.flat);
      EXPECT_TRUE(at::equal(one.flat, one.flat.to(dtype).to(at::kFloat))) << "more precise than " << dtype;
      const at::Tensor mean = sum_of_ranks(0, context.world_size()) / context.world_size();
      EXPECT_TRUE(at::allclose(one.flat.to(at::kDouble), mean, 0, dtype == at::kHalf ? 1e-3 : 8e-3));
      EXPECT_FALSE(at::allclose(one.flat.to(at::kDouble), mean, 1e-6, 1e-6)) << "nothing was rounded";
    }
    // The largest float16 is 65504: a sum before the division would be infinite.
    const OneBucket large(ReduceOp::kMean, at::kFloat);
    large.flat.fill_(60000);
    fp16_compress_hook()->reduce(large.bucket, context.group())();
    EXPECT_TRUE(at::allclose(large.flat, at::full({125}, 60000.0f), 1e-3));
  });
}

TEST_P(Hooks, WrappersCompose) {
  run_ranks(GetParam(), [](Context& context) {
    const CommHookPtr hook = bf16_compress_hook(power_sgd_hook({.start_iter = 0}));
    const OneBucket one(ReduceOp::kMean, at::kFloat);
    one.fill(0, context.rank());
    hook->reduce(one.bucket, context.group())();
    expect_equal_on_all_ranks(context, one.flat);
    EXPECT_TRUE(at::equal(one.flat, one.flat.to(at::kBFloat16).to(at::kFloat)));
    const at::Tensor singular = at::linalg_svdvals(one.bucket.parts[0]);
    EXPECT_LT(singular[1].item<float>(), 0.02 * singular[0].item<float>()) << "not of rank 1";
    EXPECT_TRUE(hook->state_dict().contains("q.0"));  // that of the inner hook
    EXPECT_EQ(hook->state_dict()["q.0"].scalar_type(), at::kBFloat16);
  });
}

// --- in DistributedDataParallel --------------------------------------------------------------------------------------

/// A user's own hook.
struct InHalf : CommHook {
  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    at::Tensor half = bucket.gradients.to(at::kHalf);
    Work work = group.all_reduce_async(half, bucket.op);
    return [=] { work.wait(), bucket.gradients.copy_(half); };
  }
};

/// Sees zeros between gradients, and leaves NaN there.
struct SpoilsGaps : CommHook {
  Finish reduce(const GradientBucket& bucket, const Group& group) override {
    double all = 0;
    int64_t elements = 0;
    for (const at::Tensor& part : bucket.parts) {
      all += part.abs().sum().item<double>();
      elements += part.numel();
    }
    EXPECT_NEAR(bucket.gradients.abs().sum().item<double>(), all, 1e-5 * all);
    gaps += bucket.gradients.numel() - elements;
    Work work = group.all_reduce_async(bucket.gradients, bucket.op);
    return [=] {
      work.wait();
      std::vector<at::Tensor> results;
      for (const at::Tensor& part : bucket.parts) results.push_back(part.clone());
      bucket.gradients.fill_(std::nan(""));
      for (size_t i = 0; i < results.size(); ++i) bucket.parts[i].copy_(results[i]);
    };
  }
  int64_t gaps = 0;  ///< elements
};

/// Hash of the weights after `steps` steps, starting with step `first`.
std::string train(Model& model, torch::optim::SGD& optimizer, int rank, int first, int steps) {
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    loss_of(model, batch(step, rank), step, rank).backward();
    optimizer.step();
  }
  return hash(state_dict(model));
}

std::string train_with(Context& context, const CommHookPtr& hook, const std::string& name = "plain",
                       DistributedDataParallelOptions options = {}) {
  auto model = make_model(name);
  DistributedDataParallel replica(model, context, options);
  replica.register_comm_hook(hook);
  auto optimizer = make_sgd(*model);
  const std::string weights = train(*model, optimizer, context.rank(), 0, 10);
  const auto all = context.group().all_gather_bytes(weights);
  for (const auto& other : all) EXPECT_EQ(other, all[0]);
  return weights;
}

TEST_P(Hooks, GapsBetweenGradientsStayZeros) {
  run_ranks(GetParam(), [](Context& context) {
    const auto net = make_model("plain"), theirs = make_model("plain");
    fill(*net), fill(*theirs);
    DistributedDataParallel model(net, context), reference(theirs, context);
    const auto hook = std::make_shared<SpoilsGaps>();
    model.register_comm_hook(hook);
    for (int step = 0; step < 3; ++step) {
      const Sample sample = batch(step, context.rank());
      for (const auto& one : {net, theirs}) {
        one->zero_grad();
        loss_of(*one, sample, step, context.rank()).backward();
      }
      const auto expected = theirs->parameters();
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(net->parameters()[i].grad().equal(expected[i].grad())) << "gradient " << i;
    }
    EXPECT_GT(hook->gaps, 0);
  });
}

/// The norm of complex gradients is taken of whole buckets.
TEST_P(Hooks, GapsBetweenGradientsCountInNoNorm) {
  run_ranks(GetParam(), [](Context& context) {
    struct Complex : torch::nn::Module {
      at::Tensor a = register_parameter("a", at::ones({3}, at::kComplexFloat)),
                 b = register_parameter("b", at::ones({5}, at::kComplexFloat));
    };
    struct Spoils : CommHook {
      Finish reduce(const GradientBucket& bucket, const Group& group) override {
        return [=, work = group.all_reduce_async(bucket.gradients, bucket.op)] {
          work.wait();
          bucket.gradients.fill_(std::nan(""));
          for (const at::Tensor& part : bucket.parts) part.fill_(2);
        };
      }
    };
    const auto net = std::make_shared<Complex>();
    DistributedDataParallel model(net, context);
    model.register_comm_hook(std::make_shared<Spoils>());
    at::real((net->a.sum() + net->b.sum())).backward();
    ASSERT_TRUE(net->a.grad().is_alias_of(net->b.grad()));
    EXPECT_NEAR(model.clip_grad_norm(100), std::sqrt(8 * 4), 1e-5);
  });
}

TEST_P(Hooks, OfAUserIsTenLines) {
  run_ranks(GetParam(), [](Context& context) {
    const std::string mine = train_with(context, std::make_shared<InHalf>());
    EXPECT_NE(mine, train_with(context, nullptr));
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    replica.register_comm_hook(std::make_shared<InHalf>());
    loss_of(*model, batch(0, context.rank()), 0, context.rank()).backward();
    const at::Tensor gradient = model->parameters()[0].grad();
    EXPECT_TRUE(at::equal(gradient, gradient.to(at::kHalf).to(at::kFloat)));
  });
}

TEST_P(Hooks, AllReduceHasTheBitsOfNoHook) {
  run_ranks(GetParam(), [](Context& context) {
    for (const char* model : {"plain", "branches", "batch_norm", "shared"}) {
      const std::string with = train_with(context, all_reduce_hook(), model);
      EXPECT_EQ(with, train_with(context, nullptr, model)) << model;
    }
  });
}

TEST_P(Hooks, SeveralBucketsEachWithItsOwnState) {
  run_ranks(GetParam(), [](Context& context) {
    const DistributedDataParallelOptions small{.first_bucket_cap_mb = 1e-6, .bucket_cap_mb = 1e-6};
    for (const char* name : {"power_sgd_rank2", "fp16"})
      EXPECT_NE(train_with(context, make_hook(name), "plain", small), train_with(context, nullptr, "plain", small));
    train_with(context, top_k_hook({.density = 0.3}), "branches", small);
  });
}

TEST_P(Hooks, StateGoesThroughACheckpoint) {
  run_ranks(GetParam(), [](Context& context) {
    const int rank = context.rank();
    for (const auto& make : {+[] { return power_sgd_hook({.matrix_approximation_rank = 1, .start_iter = 2}); },
                             +[] { return power_sgd_hook({.start_iter = 2, .warm_start = false}); },
                             +[] { return top_k_hook({.density = 0.1, .start_iter = 2}); },
                             +[] { return bf16_compress_hook(power_sgd_hook({.start_iter = 2})); }}) {
      auto model = make_model("plain");
      DistributedDataParallel replica(model, context);
      const CommHookPtr hook = make(), resumed = make();
      replica.register_comm_hook(hook);
      auto optimizer = make_sgd(*model);
      train(*model, optimizer, rank, 0, 5);
      const std::string path = ::testing::TempDir() + "hook_state_" + std::to_string(getpid()) + ".safetensors";
      save({hook->state_dict(), {}}, path);
      StateDict weights;
      for (const auto& item : state_dict(*model)) weights.insert(item.key(), item.value().detach().clone());
      const StateDict momentum = [&] {
        StateDict copy;
        for (const auto& item : state_dict(optimizer)) copy.insert(item.key(), item.value().clone());
        return copy;
      }();
      const std::string straight = train(*model, optimizer, rank, 5, 5);
      load_state_dict(*model, weights);
      load_state_dict(optimizer, momentum);
      resumed->load_state_dict(load(path).tensors);
      replica.register_comm_hook(resumed);
      EXPECT_EQ(train(*model, optimizer, rank, 5, 5), straight);
      load_state_dict(*model, weights);  // without the state they would differ
      load_state_dict(optimizer, momentum);
      replica.register_comm_hook(make());
      EXPECT_NE(train(*model, optimizer, rank, 5, 5), straight);
      std::remove(path.c_str());
    }
  });
}

TEST(HookMisuse, IsRefusedWithAdvice) {
  run_ranks(2, [](Context& context) {
    EXPECT_THROW(power_sgd_hook({.matrix_approximation_rank = 0}), c10::Error);
    EXPECT_THROW(top_k_hook({.density = 0}), c10::Error);
    EXPECT_THROW(PeriodicModelAverager(context.group(), 0), c10::Error);
    StateDict state;
    state.insert("iteration", at::zeros({}, at::kLong));
    EXPECT_THROW(all_reduce_hook()->load_state_dict(state), Error);
    EXPECT_THROW(power_sgd_hook()->load_state_dict(state), Error);
    state.insert("strange", at::zeros({}));
    EXPECT_THROW(top_k_hook()->load_state_dict(state), Error);
  });
}

TEST(PostLocalSgd, ASubgroupGoesOnAveraging) {
  run_ranks(3, [](Context& context) {
    const auto subgroup = context.group().subgroup({0, 2});
    const CommHookPtr hook = post_local_sgd_hook({.start_iter = 1, .subgroup = subgroup});
    const OneBucket one(ReduceOp::kMean);
    one.flat.fill_(context.rank());
    hook->reduce(one.bucket, context.group())();
    EXPECT_EQ(one.flat[0].item<double>(), 1);
    one.flat.fill_(context.rank() * 10);
    hook->reduce(one.bucket, context.group())();
    EXPECT_EQ(one.flat[0].item<double>(), 10);  // ranks 0 and 2: the mean of 0 and 20; rank 1: its own
    one.flat.fill_(context.rank() == 0 ? 2 : 8);
    hook->reduce(one.bucket, context.group())();
    EXPECT_EQ(one.flat[0].item<double>(), context.rank() == 1 ? 8 : 5);
  });
}

}  // namespace
}  // namespace lockstep::communication_hook_test
