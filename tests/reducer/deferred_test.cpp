#include <gtest/gtest.h>

#include <limits>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/reducer.h"
#include "support/ranks.h"

// An optimizer that sums the gradients itself, between settle() and end_step(). Expected: what another reducer, which
// sums during backward, leaves in .grad for the same losses.

namespace lockstep::deferred_test {
namespace {

using testing::Engine;
using testing::run_ranks;

constexpr BucketLimits kSmallBuckets{64, 128};

/// Parameters, a reducer over them, and what its events said.
struct Side {
  Side(const Context& context, GradientReduction reduction, int object)
      : group(context.group()),
        reducer(parameters, group, {kSmallBuckets, reduction, object}, *passes,
                {.inspect = [] { return ""; }, .reduced = [this](const std::vector<Facts>&) { ++reductions; }}) {}

  const at::Tensor& operator[](size_t i) const { return parameters[i].second; }
  at::Tensor loss(int step, int rank) const {
    const auto at = static_cast<double>(step + 1);
    at::Tensor sum = ((*this)[0] * (rank + at)).square().sum() + ((*this)[1] * at * (2 * rank - 1)).sum();
    if (rank == step % group.world_size()) sum = sum + (*this)[2].pow(3).sum();  // one rank reaches it
    return sum;
  }
  void zero_grad() const {
    for (const auto& [name, parameter] : parameters) parameter.mutable_grad().reset();
  }

  static at::Tensor parameter(at::IntArrayRef shape) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    return (at::arange(elements, at::kDouble) / 8 + 1).reshape(shape).requires_grad_();
  }
  const NamedTensors parameters{
      {"a", parameter({5, 3})}, {"b", parameter({7})}, {"c", parameter({2, 2})}, {"unused", parameter({3})}};
  const Group group;
  int reductions = 0;
  std::shared_ptr<BackwardPasses> passes = std::make_shared<BackwardPasses>();
  Reducer reducer;
};

using Gradients = std::vector<at::Tensor>;

/// The least that an optimizer does: takes the sum of all ranks' buckets, and changes nothing.
struct Optimizer final : SharedStep {
  explicit Optimizer(Side& of) : side(of) { side.reducer.defer_to(this); }
  ~Optimizer() override { side.reducer.defer_to(nullptr); }

  std::string backward_begins(bool) override { return ""; }
  bool wants_sum() const override { return true; }
  std::vector<Facts> step_without_inputs() override { return step(Reducer::Share::kOutOfInputs); }

  std::vector<Facts> step(Reducer::Share share = Reducer::Share::kGradients) {
    settlement = side.reducer.settle(share);
    gradients.assign(side.parameters.size(), {});
    for (size_t b = 0; b < side.reducer.plan().size(); ++b) {
      const Bucket& bucket = side.reducer.buckets()[b];
      const at::Tensor sum = bucket.gradients().clone();
      side.group.all_reduce(sum);
      for (size_t slot = 0; slot < bucket.size(); ++slot)
        if (const size_t i = side.reducer.plan()[b][slot]; settlement.used[i])
          gradients[i] = bucket.place_in(sum, slot);
    }
    for (size_t i = 0; side.reducer.plan().empty() && i < gradients.size(); ++i)
      if (settlement.used[i]) gradients[i] = side[i].grad().clone();
    for (const at::Tensor& gradient : gradients)
      if (gradient.defined()) gradient.div_(settlement.divisor).mul_(settlement.factor);
    side.reducer.end_step(settlement);
    return settlement.ranks;
  }

  Side& side;
  Reducer::Settlement settlement;
  Gradients gradients;
};

void expect_equal(const Gradients& actual, const Side& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor& gradient = expected[i].grad();
    ASSERT_EQ(actual[i].defined(), gradient.defined()) << expected.parameters[i].first;
    if (gradient.defined()) {
      EXPECT_TRUE(at::allclose(actual[i], gradient, 1e-12, 1e-14)) << actual[i] << "\nexpected\n" << gradient;
    }
  }
}

template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

class Deferred : public ::testing::TestWithParam<std::tuple<Engine, GradientReduction>> {
 protected:
  void on_ranks(const std::function<void(Context&, Side& usual, Side& deferred)>& body) {
    const auto& [engine, reduction] = GetParam();
    run_ranks(engine, [&body, reduction = reduction](Context& context) {
      Side usual(context, reduction, 1), deferred(context, reduction, 2);
      for (Side* side : {&usual, &deferred})
        side->reducer.set_weight(reduction == GradientReduction::kWeightedMean ? context.rank() + 2 : 1);
      body(context, usual, deferred);
    });
  }
};
std::string name_of(const ::testing::TestParamInfo<Deferred::ParamType>& instance) {
  const auto& [engine, reduction] = instance.param;
  const char* names[] = {"mean", "sum", "weighted"};
  return testing::name_of(engine) + "_" + names[static_cast<int>(reduction)];
}
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
const GradientReduction kReductions[] = {GradientReduction::kMean, GradientReduction::kSum,
                                         GradientReduction::kWeightedMean};
INSTANTIATE_TEST_SUITE_P(Engines, Deferred,
                         ::testing::Combine(::testing::ValuesIn(kEngines), ::testing::ValuesIn(kReductions)), name_of);

TEST_P(Deferred, ASumIsWhatBackwardWouldLeave) {
  on_ranks([](Context& context, Side& usual, Side& deferred) {
    Optimizer optimizer(deferred);
    for (int step = 0; step < 6; ++step) {
      // Gradients that were weighted are dropped, so only the others can go on adding up.
      const bool keeps = step == 2 && std::get<1>(GetParam()) != GradientReduction::kWeightedMean;
      for (Side* side : {&usual, &deferred}) {
        if (!keeps) side->zero_grad();
        if (step == 3) {
          const NoSyncGuard guard(side->passes);
          side->loss(7, context.rank()).backward();
        }
        side->loss(step, context.rank()).backward();
        EXPECT_EQ(side->passes->since_reduction, 0);
        if (step == 4) side->reducer.reduce();
      }
      optimizer.step();
      EXPECT_FALSE(optimizer.settlement.is_void);
      expect_equal(optimizer.gradients, usual);
    }
    EXPECT_EQ(deferred.reductions, 6);
  });
}

TEST_P(Deferred, UntilTheStepGradientsAreTheRanksOwn) {
  on_ranks([](Context& context, Side&, Side& deferred) {
    Optimizer optimizer(deferred);
    deferred.loss(0, context.rank()).backward();
    EXPECT_EQ(deferred[1].grad()[0].item<double>(), 2 * context.rank() - 1);
    EXPECT_EQ(deferred[2].grad().defined(), context.rank() == 0);
    optimizer.step();
    EXPECT_FALSE(optimizer.settlement.used[3]);
  });
}

TEST_P(Deferred, ARankThatSkipsTakesPartInTheNextStep) {
  on_ranks([](Context& context, Side& usual, Side& deferred) {
    Optimizer optimizer(deferred);
    const bool skips = context.rank() == context.world_size() - 1;
    for (int step = 0; step < 2; ++step) {
      for (Side* side : {&usual, &deferred}) {
        side->zero_grad();
        if (skips && step == 1) {
          const NoSyncGuard guard(side->passes);  // what it had begun counts for nothing
          side->loss(7, context.rank()).backward();
        }
        skips ? side->reducer.skip() : side->loss(step, context.rank()).backward();
      }
      EXPECT_EQ(deferred[0].grad().defined(), !skips);
      optimizer.step();
      EXPECT_EQ(optimizer.settlement.is_void, context.world_size() == 1);
      expect_equal(optimizer.gradients, usual);
      if (skips) {
        EXPECT_FALSE(deferred[0].grad().defined());
      }
    }
    EXPECT_EQ(deferred.reductions, 2);
  });
}

TEST_P(Deferred, ARankWithoutInputsDoesItsPartOfTheStep) {
  on_ranks([](Context& context, Side& usual, Side& deferred) {
    Optimizer optimizer(deferred);
    for (Side* side : {&usual, &deferred}) side->reducer.set_joining(true, /*divide_by_active=*/true);
    const bool active = context.rank() == 0;
    for (Side* side : {&usual, &deferred})
      active ? side->loss(0, 0).backward() : static_cast<void>(side->reducer.shadow());
    if (active) optimizer.step();
    expect_equal(optimizer.gradients, usual);
    const auto ranks = deferred.reducer.shadow();
    EXPECT_TRUE(std::none_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; }));
    EXPECT_TRUE(optimizer.settlement.is_void);
  });
}

class DeferredErrors : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeferredErrors, ::testing::Values(2, 3));

TEST_P(DeferredErrors, AreThrownByAllRanksAndTheNextStepIsAStep) {
  run_ranks(GetParam(), [](Context& context) {
    Side usual(context, GradientReduction::kMean, 1), deferred(context, GradientReduction::kMean, 2);
    Optimizer optimizer(deferred);
    const int last = context.world_size() - 1;
    deferred.loss(0, context.rank()).backward();
    if (context.rank() == last) deferred[0].mutable_grad() = at::eye(5, 3, at::kDouble).to_sparse();
    const std::string sparse = error_of([&] { optimizer.step(); });
    EXPECT_EQ(sparse.find("rank " + std::to_string(last) + ": parameter a has a sparse gradient"), 0u) << sparse;
    deferred.zero_grad();

    for (int pass = 0; pass <= context.rank() / last; ++pass) deferred.loss(0, context.rank()).backward();
    const std::string passes = error_of([&] { optimizer.step(); });
    EXPECT_NE(passes.find("different numbers of backward passes"), std::string::npos) << passes;
    deferred.zero_grad();

    const std::string edit = error_of(
        [&] { context.rank() == last ? deferred.reducer.fail("it was edited") : static_cast<void>(optimizer.step()); });
    EXPECT_EQ(edit, "rank " + std::to_string(last) + ": it was edited");

    for (Side* side : {&usual, &deferred}) side->loss(1, context.rank()).backward();
    optimizer.step();
    expect_equal(optimizer.gradients, usual);
  });
}

TEST_P(DeferredErrors, AGradientThatIsNotFiniteMakesTheStepVoid) {
  run_ranks(GetParam(), [](Context& context) {
    Side side(context, GradientReduction::kMean, 1);
    Optimizer optimizer(side);
    const auto watch = std::make_shared<NonFiniteWatch>(NonFinitePolicy::kSkip);
    side.reducer.equip({.hook = nullptr, .watch = watch, .timeline = nullptr});
    for (const bool finite : {false, true}) {
      side.zero_grad();
      const double scale = finite || context.rank() == 0 ? 1 : std::numeric_limits<double>::infinity();
      (side.loss(0, context.rank()) * scale).backward();
      side.loss(0, context.rank()).backward();  // another pass does not make it forgotten
      optimizer.step();
      EXPECT_EQ(optimizer.settlement.is_void, !finite);
      EXPECT_EQ(side[0].grad().defined(), finite);
      EXPECT_EQ(watch->skipped(), 1);
    }
  });
}

TEST_P(DeferredErrors, WhatTheUserMakesOfGradientsCounts) {
  run_ranks(GetParam(), [](Context& context) {
    Side side(context, GradientReduction::kMean, 1);
    Optimizer optimizer(side);
    side.loss(0, context.rank()).backward();
    side[0].mutable_grad().reset();
    side[1].mutable_grad() = at::full({7}, context.rank(), at::kDouble);
    accept_gradients({side[0].unsafeGetTensorImpl()});  // else it is an error
    optimizer.step();
    EXPECT_FALSE(optimizer.settlement.used[0]);
    EXPECT_EQ(optimizer.gradients[1][6].item<double>(), (context.world_size() - 1) / 2.0);
  });
}

TEST_P(DeferredErrors, ACommunicationHookIsRefused) {
  run_ranks(GetParam(), [](Context& context) {
    Side side(context, GradientReduction::kMean, 1);
    const Reducer::Equipment hook{.hook = all_reduce_hook(), .watch = nullptr, .timeline = nullptr};
    {
      Optimizer optimizer(side);
      EXPECT_NE(error_of([&] { side.reducer.equip(hook); }).find("communication hook"), std::string::npos);
    }
    side.reducer.equip(hook);
    EXPECT_NE(error_of([&] { Optimizer optimizer(side); }).find("communication hook"), std::string::npos);
  });
}

TEST_P(DeferredErrors, ASuccessorTakesOver) {
  run_ranks(GetParam(), [](Context& context) {
    Side usual(context, GradientReduction::kSum, 1), first(context, GradientReduction::kSum, 2);
    Optimizer optimizer(first);
    for (Side* side : {&usual, &first}) side->loss(0, context.rank()).backward();
    Reducer next(first.parameters, first.group, {kSmallBuckets, GradientReduction::kSum, 2}, *first.passes,
                 {.inspect = [] { return ""; }, .reduced = [](const auto&) {}});
    next.take_over_from(first.reducer);
    const Reducer::Settlement settlement = next.settle();
    const at::Tensor sum = next.buckets().front().gradients().clone();
    next.end_step(settlement);
    context.group().all_reduce(sum);
    EXPECT_EQ(settlement.ranks.front().passes, 1);
    const size_t i = next.plan().front().back();
    EXPECT_TRUE(at::allclose(sum.narrow(0, sum.numel() - usual[i].numel(), usual[i].numel()),
                             usual[i].grad().defined() ? usual[i].grad().reshape(-1) : at::zeros_like(usual[i])));
  });
}

TEST_P(DeferredErrors, WithoutAnOptimizerBackwardReducesAgain) {
  run_ranks(GetParam(), [](Context& context) {
    Side usual(context, GradientReduction::kMean, 1), deferred(context, GradientReduction::kMean, 2);
    {
      Optimizer optimizer(deferred);
      deferred.loss(0, context.rank()).backward();
      optimizer.step();
    }
    deferred.zero_grad();
    for (Side* side : {&usual, &deferred}) side->loss(1, context.rank()).backward();
    Gradients gradients;
    for (const auto& [name, parameter] : deferred.parameters) gradients.push_back(parameter.grad());
    expect_equal(gradients, usual);
  });
}

}  // namespace
}  // namespace lockstep::deferred_test
