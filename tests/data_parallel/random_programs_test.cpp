#include <gtest/gtest.h>

#include <random>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "data_parallel/recompute.h"
#include "support/ranks.h"

// Random programs that use DistributedDataParallel rightly: none may raise an error, and each must leave the gradients
// that one process computes by running every rank's share itself, in fp64. 500 of them take seconds. A failure names
// the seed.

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

using Parameters = std::vector<at::Tensor>;

struct Blocks : torch::nn::Module {
  explicit Blocks(int count) {
    for (int i = 0; i < count; ++i) blocks.push_back(register_module("b" + std::to_string(i), torch::nn::Linear(5, 5)));
    fill(*this);
    to(at::kDouble);
  }
  std::vector<torch::nn::Linear> blocks;
};

/// What a program does, decided by its seed alone and so alike on every rank.
class Program {
 public:
  Program(int seed, int world_size) : world_size_(world_size), random_(static_cast<uint32_t>(seed)) {
    blocks_ = draw(1, 5);
    recomputes_ = draw(0, 3) == 0;
    options_.first_bucket_cap_mb = draw(0, 1) ? 1 : 1e-4;
    options_.bucket_cap_mb = draw(0, 1) ? 25 : 3e-4;
    options_.reduction = std::array{GradientReduction::kMean, GradientReduction::kSum,
                                    GradientReduction::kWeightedMean}[static_cast<size_t>(draw(0, 2))];
  }

  void run(const Context& context) {
    const auto model = std::make_shared<Blocks>(blocks_), reference = std::make_shared<Blocks>(blocks_);
    freeze(*model, *reference);
    DistributedDataParallel replica(model, context, options_);
    carried_.assign(model->parameters().size(), at::Tensor());
    const int steps = draw(2, 5);
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      if (draw(0, 3) == 0) {
        freeze(*model, *reference);
        replica.refresh();
      }
      const auto weights = draw_weights();
      if (options_.reduction == GradientReduction::kWeightedMean)
        replica.set_weight(weights[static_cast<size_t>(context.rank())]);
      local_.assign(static_cast<size_t>(world_size_), Parameters(carried_.size()));
      run_passes(replica, *model, *reference, context.rank());
      compare(*model, weights);
      update(*model, *reference);
    }
    replica.check_divergence();
  }

 private:
  int draw(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }

  /// Any but the first block's weight; the same on both.
  void freeze(Blocks& model, Blocks& reference) {
    for (size_t i = 1; i < model.parameters().size(); ++i) {
      const bool trained = draw(0, 4) != 0;
      for (auto* blocks : {&model, &reference}) {
        at::Tensor parameter = blocks->parameters()[i];
        parameter.set_requires_grad(trained);
      }
    }
  }

  std::vector<double> draw_weights() {
    std::vector<double> weights;
    for (int rank = 0; rank < world_size_; ++rank)
      weights.push_back(options_.reduction == GradientReduction::kWeightedMean ? draw(rank == 0 ? 1 : 0, 50) : 1);
    return weights;
  }

  /// A few backward passes of which only the last reduces.
  void run_passes(DistributedDataParallel<std::shared_ptr<Blocks>>& replica, Blocks& model, Blocks& reference,
                  int rank) {
    const int passes = draw(1, 3), how = draw(0, 2);
    const auto pass = [&] {
      const auto seed = static_cast<uint32_t>(draw(0, 1 << 30));
      backward(model, seed, rank);
      for (int r = 0; r < world_size_; ++r) note_local(reference, seed, r);
    };
    if (how == 0) {
      const auto accumulation = replica.accumulate(passes);
      for (int i = 0; i < passes; ++i) pass();
      EXPECT_TRUE(accumulation.complete());
      return;
    }
    {
      const auto guard = replica.no_sync();
      for (int i = 1; i < passes; ++i) pass();
    }
    if (how == 1 || passes == 1) return pass();
    replica.reduce_gradients();
  }

  /// One backward of `rank`: forwards through blocks chosen by rank, some several times, some recomputed.
  void backward(Blocks& model, uint32_t seed, int rank) const {
    std::mt19937 choose(seed + (seed % 3 == 0 ? static_cast<uint32_t>(rank) : 0));  // one in three differs by rank
    const auto any = [&](int low, int high) { return std::uniform_int_distribution(low, high)(choose); };
    std::vector<Recompute::Segment> segments;
    segments.reserve(32);
    at::Tensor loss = (model.parameters()[0] * 0).sum();
    const int forwards = any(1, 2);
    for (int forward = 0; forward < forwards; ++forward) {
      at::Tensor x = formula({3, 5}, seed % 1000 + rank * 7 + forward).requires_grad_();
      const int length = any(1, blocks_ + 1);
      for (int i = 0; i < length; ++i) {
        auto block = model.blocks[static_cast<size_t>(any(0, blocks_ - 1))];
        segments.push_back([block](const at::Tensor& in) mutable { return torch::tanh(block(in)); });
        x = recomputes_ && any(0, 1) ? recompute(segments.back(), x) : segments.back()(x);
      }
      loss = loss + x.square().mean();
    }
    loss.backward();
  }

  /// Adds what the pass gives one rank alone.
  void note_local(Blocks& reference, uint32_t seed, int rank) {
    const auto parameters = reference.parameters();
    for (auto parameter : parameters) parameter.mutable_grad() = at::Tensor();
    backward(reference, seed, rank);
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& sum = local_[static_cast<size_t>(rank)][i];
      const at::Tensor& gradient = parameters[i].grad();
      if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient.clone();
    }
  }

  at::Tensor reduced(size_t parameter, const std::vector<double>& weights) const {
    double total = 0;
    for (double weight : weights) total += weight;
    if (options_.reduction == GradientReduction::kSum) total = 1;
    at::Tensor sum;
    for (size_t r = 0; r < weights.size(); ++r) {
      const at::Tensor& gradient = local_[r][parameter];
      if (!gradient.defined()) continue;
      const at::Tensor share = gradient * (weights[r] / total);
      sum = sum.defined() ? sum + share : share;
    }
    return sum;
  }

  void compare(const Blocks& model, const std::vector<double>& weights) {
    const auto parameters = model.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor sum = reduced(i, weights);
      if (sum.defined()) carried_[i] = carried_[i].defined() ? carried_[i] + sum : sum;
      ASSERT_EQ(parameters[i].grad().defined(), carried_[i].defined()) << "parameter " << i;
      if (carried_[i].defined()) {
        ASSERT_TRUE(at::allclose(parameters[i].grad(), carried_[i], 1e-11, 1e-13))
            << "parameter " << i << "\n"
            << parameters[i].grad() << "\nexpected\n"
            << carried_[i];
      }
    }
  }

  /// A step of gradient descent, and zero_grad() in one of its ways or not at all.
  void update(Blocks& model, Blocks& reference) {
    at::NoGradGuard no_grad;
    const int way = draw(0, 3);
    auto parameters = model.parameters(), others = reference.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      parameters[i] -= 0.05 * gradient;
      others[i] -= 0.05 * carried_[i];
      if (way == 0) continue;
      if (way == 1) {
        gradient.zero_();
        carried_[i] = at::zeros_like(carried_[i]);
      } else {
        parameters[i].mutable_grad() = at::Tensor();
        carried_[i] = at::Tensor();
      }
    }
  }

  const int world_size_;
  std::mt19937 random_;
  int blocks_;
  bool recomputes_;
  DistributedDataParallelOptions options_;
  std::vector<Parameters> local_;  ///< of each rank, since the last reduction
  Parameters carried_;             ///< what .grad must hold
};

struct Share {
  Engine engine;
  int first_seed, count;
  friend void PrintTo(const Share& share, std::ostream* out) { *out << name_of(share.engine); }
};

class RandomPrograms : public ::testing::TestWithParam<Share> {};
INSTANTIATE_TEST_SUITE_P(Engines, RandomPrograms,
                         ::testing::Values(Share{{1, ""}, 0, 40}, Share{{2, "shm"}, 1000, 140},
                                           Share{{3, "shm"}, 2000, 120}, Share{{4, "shm"}, 3000, 80},
                                           Share{{2, "gloo"}, 4000, 60}, Share{{3, "gloo"}, 5000, 40},
                                           Share{{4, "gloo"}, 6000, 20}),
                         [](const auto& instance) { return name_of(instance.param.engine); });

TEST_P(RandomPrograms, RaiseNoAlarmAndAgreeWithOneProcess) {
  const Share share = GetParam();
  const auto body = [&](Context& context) {
    for (int seed = share.first_seed; seed < share.first_seed + share.count; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      try {
        Program(seed, context.world_size()).run(context);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      if (::testing::Test::HasFailure()) return;  // the ranks may no longer be in step
    }
  };
  run_ranks(share.engine.world_size, body, std::chrono::seconds(110),
            {.backend = share.engine.backend, .announce = false});
}

class Bits : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {4, "shm"}};
INSTANTIATE_TEST_SUITE_P(Engines, Bits, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(Bits, OfSharedMemoryAreThoseOfTheSequentialSumAndOfEveryRun) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("shared"), other = make_model("shared");
    for (const double megabytes : {1e-6, 2e-4, 25.0, 25.0}) {
      DistributedDataParallel replica(
          model, context,
          {.first_bucket_cap_mb = megabytes, .bucket_cap_mb = megabytes, .reduction = GradientReduction::kSum});
      for (int step = 0; step < 3; ++step) {
        for (auto* module : {model.get(), other.get()}) module->zero_grad();
        loss_of(*model, batch(step, context.rank()), step, 0).backward();
        loss_of(*other, batch(step, context.rank()), step, 0).backward();
        for (size_t i = 0; i < model->parameters().size(); ++i) {
          const at::Tensor all = context.group().all_gather(other->parameters()[i].grad());
          at::Tensor sum = all[0].clone();
          for (int rank = 1; rank < context.world_size(); ++rank) sum += all[rank];
          EXPECT_TRUE(at::equal(model->parameters()[i].grad(), sum)) << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep
