// Hooks that work on the part between machines alone. Machines are made by LOCKSTEP_MACHINE.

#include <lockstep/comm_hook.h>

#include <algorithm>

#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "support/ranks.h"

namespace lockstep::between_machines_test {
namespace {

using namespace testing;  // NOLINT

class BetweenMachines : public ::testing::TestWithParam<Engine> {};
const Engine kSpread[] = {{3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}, {4, "hierarchical", "aaab"}};
INSTANTIATE_TEST_SUITE_P(Machines, BetweenMachines, ::testing::ValuesIn(kSpread),
                         [](const auto& instance) { return name_of(instance.param); });

/// Whole numbers up to 1000 or so: their sums are exact in any order, but not in bfloat16.
at::Tensor numbers(int step, int rank) { return (formula({125}, step * 10 + rank) * 1000).round(); }

/// One 12 x 10 matrix and a vector of 5.
struct Bucket {
  Bucket(const at::Tensor& values, ReduceOp op) : flat(values.clone()) {
    bucket = {0, true, op, flat, {flat.narrow(0, 0, 120).view({12, 10}), flat.narrow(0, 120, 5)}};
  }
  at::Tensor flat;
  GradientBucket bucket;
};

at::Tensor reduced(CommHook& hook, const Group& group, const at::Tensor& values, ReduceOp op) {
  const Bucket one(values, op);
  hook.reduce(one.bucket, group)();
  return one.flat;
}

/// Each machine's sum of its ranks' numbers, and its first rank.
struct Sums {
  std::vector<at::Tensor> of;
  std::vector<int> leaders;

  Sums(int step, const std::string& machines) {
    for (size_t rank = 0; rank < machines.size(); ++rank) {
      const at::Tensor mine = numbers(step, static_cast<int>(rank));
      if (rank > 0 && machines[rank] == machines[rank - 1]) {
        of.back() += mine;
        continue;
      }
      of.push_back(mine);
      leaders.push_back(static_cast<int>(rank));
    }
  }
  at::Tensor total() const { return at::stack(of).sum(0); }
};

TEST_P(BetweenMachines, OnlyWhatTravelsIsRounded) {
  const Engine& engine = GetParam();
  run_ranks(engine, [&](Context& context) {
    const int ranks = context.world_size();
    const at::Tensor mine = numbers(0, context.rank()).to(at::kFloat);
    const Sums sums(0, engine.machines);
    const double share = 2.0 / ranks;
    at::Tensor expected = at::zeros({125});
    for (const at::Tensor& sum : sums.of) expected += (sum.to(at::kFloat) * share / 2).to(at::kBFloat16).to(at::kFloat);
    const CommHookPtr hook = between_machines_hook(bf16_compress_hook());
    for (int again = 0; again < 2; ++again)
      EXPECT_TRUE(
          at::equal(reduced(*hook, context.group(), mine, ReduceOp::kMean), expected.to(at::kBFloat16).to(at::kFloat)));
    EXPECT_FALSE(at::equal(reduced(*bf16_compress_hook(), context.group(), mine, ReduceOp::kMean),
                           expected.to(at::kBFloat16).to(at::kFloat)))
        << "what every rank has rounded is the same: this compares nothing";
    EXPECT_TRUE(at::equal(reduced(*between_machines_hook(all_reduce_hook()), context.group(), mine, ReduceOp::kSum),
                          sums.total().to(at::kFloat)));
  });
}

TEST_P(BetweenMachines, EachMachineIsOneRankOfPowerSgd) {
  const Engine& engine = GetParam();
  run_ranks(engine, [&](Context& context) {
    const int rank = context.rank(), ranks = context.world_size();
    const auto leaders = context.group().subgroup(Sums(0, engine.machines).leaders);
    for (const ReduceOp op : {ReduceOp::kMean, ReduceOp::kSum}) {
      const CommHookPtr hook = between_machines_hook(power_sgd_hook({.start_iter = 1})),
                        alone = power_sgd_hook({.start_iter = 1});
      const double share = op == ReduceOp::kMean ? 2.0 / ranks : 1;
      for (int step = 0; step < 4; ++step) {
        const at::Tensor result = reduced(*hook, context.group(), numbers(step, rank), op);
        const auto all = context.group().all_gather(result);
        for (int other = 0; other < ranks; ++other) EXPECT_TRUE(at::equal(all[other], result));
        if (!leaders) continue;
        const at::Tensor sum = Sums(step, engine.machines).of[static_cast<size_t>(leaders->rank())] * share;
        EXPECT_TRUE(at::equal(reduced(*alone, *leaders, sum, op), result)) << "step " << step;
      }
    }
  });
}

TEST_P(BetweenMachines, ErrorFeedbackLosesNothing) {
  const Engine& engine = GetParam();
  run_ranks(engine, [&](Context& context) {
    const int rank = context.rank(), ranks = context.world_size();
    for (const auto& make : {+[] { return power_sgd_hook({.start_iter = 1}); },
                             +[] { return top_k_hook({.density = 0.1, .start_iter = 1}); }}) {
      const CommHookPtr hook = between_machines_hook(make());
      at::Tensor missing = at::zeros({125}, at::kDouble);
      for (int step = 0; step < 5; ++step) {
        missing += Sums(step, engine.machines).total() / ranks;
        missing -= reduced(*hook, context.group(), numbers(step, rank), ReduceOp::kMean);
      }
      EXPECT_GT(missing.abs().max().item<double>(), 10) << "nothing was compressed";
      at::Tensor remembered = at::zeros({125}, at::kDouble);
      for (const auto& item : hook->state_dict())
        if (item.key().starts_with("error.")) remembered.narrow(0, 0, item.value().numel()) += item.value().flatten();
      context.group().all_reduce(remembered);
      EXPECT_TRUE(at::allclose(remembered / 2, missing, 1e-9, 1e-6));
    }
  });
}

TEST(BetweenMachinesOf, OneMachineOrOneRankEach) {
  for (const Engine& engine : {Engine{3, "shm", "aaa"}, Engine{2, "gloo", "ab"}, Engine{3, "gloo", "abc"}})
    run_ranks(engine, [&](Context& context) {
      const at::Tensor mine = numbers(0, context.rank()).to(at::kFloat);
      const CommHookPtr same = engine.backend == "shm" ? all_reduce_hook() : bf16_compress_hook();
      EXPECT_TRUE(
          at::equal(reduced(*between_machines_hook(bf16_compress_hook()), context.group(), mine, ReduceOp::kMean),
                    reduced(*same, context.group(), mine, ReduceOp::kMean)));
    });
}

// --- in DistributedDataParallel --------------------------------------------------------------------------------------

class Training {
 public:
  Training(Context& context, const CommHookPtr& hook)
      : rank_(context.rank()), replica_(model_, context, {.first_bucket_cap_mb = 1e-6, .bucket_cap_mb = 1e-6}) {
    replica_.register_comm_hook(hook);
  }
  /// All weights after that many more steps.
  at::Tensor train(int steps) {
    for (const int end = step_ + steps; step_ < end; ++step_) {
      optimizer_.zero_grad();
      loss_of(*model_, batch(step_, rank_), step_, rank_).backward();
      optimizer_.step();
    }
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : model_->parameters()) flat.push_back(parameter.detach().flatten());
    return at::cat(flat);
  }

 private:
  const int rank_;
  const std::shared_ptr<Model> model_ = make_model("plain");
  DistributedDataParallel<std::shared_ptr<Model>> replica_;
  torch::optim::SGD optimizer_ = make_sgd(*model_);
  int step_ = 0;
};

TEST_P(BetweenMachines, SeveralBucketsTrain) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor exact = Training(context, nullptr).train(8);
    for (const bool rounds : {false, true}) {
      const at::Tensor weights =
          Training(context, between_machines_hook(rounds ? bf16_compress_hook() : all_reduce_hook())).train(8);
      const at::Tensor all = context.group().all_gather(weights);
      for (int rank = 0; rank < context.world_size(); ++rank) EXPECT_TRUE(at::equal(all[rank], weights));
      EXPECT_TRUE(at::allclose(weights, exact, rounds ? 3e-2 : 1e-5, rounds ? 3e-2 : 1e-6));
      EXPECT_EQ(at::allclose(weights, exact, 1e-5, 1e-6), !rounds);
    }
  });
}

TEST_P(BetweenMachines, StateIsThatOfTheMachines) {
  const Engine& engine = GetParam();
  run_ranks(engine, [&](Context& context) {
    const auto make = [] { return between_machines_hook(power_sgd_hook({.start_iter = 1})); };
    const int rank = context.rank();
    const auto step = [&](const CommHookPtr& hook, int number) {
      return reduced(*hook, context.group(), numbers(number, rank), ReduceOp::kMean);
    };
    const CommHookPtr straight = make(), resumed = make();
    for (int number = 0; number < 3; ++number) step(straight, number);
    StateDict state;
    for (const auto& item : straight->state_dict()) state.insert(item.key(), item.value().clone());
    const auto leaders = Sums(0, engine.machines).leaders;
    EXPECT_EQ(state.contains("error.0.0"), std::find(leaders.begin(), leaders.end(), rank) != leaders.end());
    resumed->load_state_dict(state);
    for (int number = 3; number < 6; ++number) EXPECT_TRUE(at::equal(step(straight, number), step(resumed, number)));

    // What a follower has saved is no leader's state: every rank says so.
    StateDict follower;
    for (const auto& item : make()->state_dict()) follower.insert(item.key(), item.value());
    follower["leads_machine"] = at::scalar_tensor(0, at::kLong);
    const CommHookPtr elsewhere = make();
    elsewhere->load_state_dict(rank == 0 ? follower : state);
    std::string said;
    try {
      step(elsewhere, 3);
    } catch (const Error& error) {
      said = error.what();
    }
    EXPECT_NE(said.find("rank 0 is now the first rank of its machine"), std::string::npos) << said;

    // Other ranks, or the same in other places, begin with the mean of what the machines have remembered.
    std::vector<StateDict> all;
    c10::Dict<std::string, at::Tensor> mine;
    for (const auto& item : state) mine.insert(item.key(), item.value());
    for (const c10::IValue& object : context.group().all_gather_object(mine)) {
      all.emplace_back();
      for (const auto& entry : object.toGenericDict())
        all.back().insert(entry.key().toStringRef(), entry.value().toTensor());
    }
    const CommHookPtr spread = make();
    spread->load_from_ranks(all);
    at::Tensor mean = at::zeros({12, 10}, at::kDouble);
    for (const StateDict& one : all)
      if (one.contains("error.0.0")) mean += one["error.0.0"] / 2;
    EXPECT_GT(mean.abs().max().item<double>(), 1);
    EXPECT_TRUE(at::allclose(spread->state_dict()["error.0.0"], mean));
    step(spread, 3);
  });
}

}  // namespace
}  // namespace lockstep::between_machines_test
