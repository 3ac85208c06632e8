#include <gtest/gtest.h>

#include <string>
#include <utility>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"

// ContextOptions::same_seed_until_loop.

namespace lockstep::seed_test {
namespace {

using lockstep::testing::Engine;
using lockstep::testing::run_ranks;

class Zeros : public Dataset {
 public:
  int64_t size() const override { return 12; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    return {at::zeros({static_cast<int64_t>(indices.size()), 4}), {}};
  }
};

bool equal_on_all_ranks(const Context& context, const at::Tensor& drawn) {
  const at::Tensor all = context.group().all_gather(drawn).reshape({context.world_size(), -1});
  return at::equal(all, drawn.reshape({1, -1}).expand_as(all));
}

/// What this rank draws once the loop has begun.
bool draws_its_own(const Context& context) {
  const at::Tensor drawn = at::rand({8});
  at::manual_seed(9 + static_cast<uint64_t>(context.rank()));
  return at::equal(drawn, at::rand({8}));
}

ContextOptions options_of(const std::string& backend) {
  return {.seed = 9, .same_seed_until_loop = true, .backend = backend, .announce = false};
}

class SameSeedUntilLoop : public ::testing::TestWithParam<Engine> {
 protected:
  void on_ranks(const std::function<void(Context&)>& body) const {
    run_ranks(GetParam().world_size, body, std::chrono::seconds(60), options_of(GetParam().backend));
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, SameSeedUntilLoop,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return lockstep::testing::name_of(instance.param); });

TEST_P(SameSeedUntilLoop, EndsWithTheFirstTrainingPassOfALoader) {
  on_ranks([](Context& context) {
    EXPECT_TRUE(equal_on_all_ranks(context, at::rand({8})));
    DataLoader test(Zeros(), context, {.batch_size = 2, .exactly_once = true});
    for ([[maybe_unused]] auto& batch : test) EXPECT_TRUE(equal_on_all_ranks(context, at::rand({8})));
    DataLoader train(Zeros(), context, {.batch_size = 2});
    bool first = true;
    for ([[maybe_unused]] auto& batch : train) {
      if (std::exchange(first, false)) {
        EXPECT_TRUE(draws_its_own(context));
      }
      EXPECT_FALSE(equal_on_all_ranks(context, torch::dropout(at::ones({64}), 0.5, true)));
    }
    // It happens once.
    at::manual_seed(1);
    for ([[maybe_unused]] auto& batch : train) EXPECT_TRUE(equal_on_all_ranks(context, at::rand({8})));
  });
}

TEST_P(SameSeedUntilLoop, EndsWithTheFirstBackwardOfAReplica) {
  on_ranks([](Context& context) {
    torch::nn::Linear net(4, 4);
    EXPECT_TRUE(equal_on_all_ranks(context, net->weight.detach().flatten())) << "before they were made equal";
    DistributedDataParallel model(net, context);
    const at::Tensor problem = at::rand({3, 4});
    EXPECT_TRUE(equal_on_all_ranks(context, problem.flatten()));
    model(problem).sum().backward();
    EXPECT_TRUE(draws_its_own(context));
    model(problem).sum().backward();
    EXPECT_FALSE(equal_on_all_ranks(context, torch::dropout(at::ones({64}), 0.5, true)));
  });
}

TEST_P(SameSeedUntilLoop, IsOverOnceAStateOfTheGeneratorIsResumed) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "checkpoints").string();
  on_ranks([&](Context& context) {
    torch::nn::Linear net(4, 4);
    DataLoader train(Zeros(), context, {.batch_size = 2});
    at::Tensor next;
    for (const bool resumes : {false, true}) {
      Checkpointer checkpointer(path, context.group(), {.asynchronous = false});
      checkpointer.add("net", *net);
      EXPECT_EQ(checkpointer.resume(), resumes);
      if (resumes) {
        for ([[maybe_unused]] auto& batch : train) {
          EXPECT_TRUE(at::equal(at::rand({8}), next));
          break;
        }
        return;
      }
      static_cast<void>(at::rand({100 + context.rank()}));  // a state that no seed leads to
      checkpointer.save(1);
      checkpointer.finish();
      next = at::rand({8});
    }
  });
}

TEST(SameSeed, ThatDiffersIsAnErrorOnAllRanks) {
  for (const bool seeds_differ : {false, true}) {
    // The ranks are made by hand, because run_ranks gives all of them the same options.
    run_ranks(3, [&](Context& context) {
      const int rank = context.rank();
      { const Context gone = std::move(context); }
      ContextOptions options = options_of("");
      if (rank == 2 && seeds_differ) options.seed = 10;
      if (rank == 2 && !seeds_differ) options.same_seed_until_loop = false;
      std::string said;
      try {
        const Context again(options);
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_EQ(said,
                std::string("ContextOptions::") +
                    (seeds_differ ? "seed is 10 on rank 2 and 9" : "same_seed_until_loop is false on rank 2 and true") +
                    " on rank 0; set it alike on all ranks");
    });
  }
}

TEST(SameSeed, NeedsASeed) {
  std::string said;
  try {
    const Context context(ContextOptions{.same_seed_until_loop = true});
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  EXPECT_EQ(said, "ContextOptions::same_seed_until_loop needs a seed; set ContextOptions::seed");
}

}  // namespace
}  // namespace lockstep::seed_test
