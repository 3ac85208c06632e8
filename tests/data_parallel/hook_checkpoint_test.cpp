// The state of a communication hook, saved and loaded by the Checkpointer.

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>

#include <gtest/gtest.h>

#include "data_parallel/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::hook_checkpoint_test {
namespace {

using namespace testing;  // NOLINT

/// A training run with all its parts in the checkpoint.
class Checkpointed {
 public:
  /// `post_local`: ranks train separately between averages.
  Checkpointed(Context& context, CommHookPtr with, const std::string& folder, bool post_local = false)
      : rank_(context.rank()),
        post_local_(post_local),
        hook_(std::move(with)),
        replica_(model_, context),
        averager_(context.group(), 3, 4),
        checkpointer_(folder, context.group(), {.asynchronous = false}) {
    const auto scope = post_local ? Checkpointer::Scope::kEachRank : Checkpointer::Scope::kAllRanks;
    replica_.register_comm_hook(hook_);
    checkpointer_.add("model", *model_, scope).add("optimizer", optimizer_, scope);
    checkpointer_.add("hook", *hook_).add("averager", averager_);
  }

  /// The weights after the steps up to `end`.
  std::string train_until(int end) {
    for (; step_ < end; ++step_) {
      optimizer_.zero_grad();
      loss_of(*model_, batch(step_, rank_), step_, rank_).backward();
      optimizer_.step();
      if (post_local_) averager_.average_parameters(model_->parameters());
    }
    return hash(state_dict(*model_));
  }
  void save() { checkpointer_.save(step_); }
  void resume() {
    ASSERT_TRUE(checkpointer_.resume());
    step_ = static_cast<int>(checkpointer_.resumed_step());
  }
  const CommHook& hook() const { return *hook_; }

 private:
  const int rank_;
  const bool post_local_;
  const CommHookPtr hook_;
  const std::shared_ptr<Model> model_ = make_model("plain");
  DistributedDataParallel<std::shared_ptr<Model>> replica_;
  torch::optim::SGD optimizer_ = make_sgd(*model_);
  PeriodicModelAverager averager_;
  Checkpointer checkpointer_;
  int step_ = 0;
};

TEST(HooksInCheckpoints, TwentyStepsAreTenAndTenResumed) {
  const std::function<CommHookPtr()> makes[] = {
      [] { return power_sgd_hook({.start_iter = 2}); }, [] { return top_k_hook({.density = 0.1, .start_iter = 2}); },
      [] { return bf16_compress_hook(power_sgd_hook({.start_iter = 2, .warm_start = false})); },
      [] { return post_local_sgd_hook({.start_iter = 4}); }};
  for (size_t i = 0; i < std::size(makes); ++i) {
    SCOPED_TRACE(i);
    const TemporaryFolder temporary;
    const std::string straight_folder = temporary.path() / "straight", folder = temporary.path() / "parts";
    run_ranks(2, [&](Context& context) {
      const bool own_weights = i == 3;
      const std::string straight = Checkpointed(context, makes[i](), straight_folder, own_weights).train_until(20);
      {
        Checkpointed first(context, makes[i](), folder, own_weights);
        EXPECT_NE(first.train_until(10), straight);
        first.save();
      }
      Checkpointed second(context, makes[i](), folder, own_weights);
      second.resume();
      EXPECT_EQ(second.train_until(20), straight);
    });
  }
}

/// The files of the errors that `ranks` ranks have not sent yet, as their mean.
void save_after_ten(int ranks, const std::function<CommHookPtr()>& make, const std::string& folder) {
  run_ranks(ranks, [&](Context& context) {
    Checkpointed training(context, make(), folder + "/run");
    training.train_until(10);
    training.save();
    StateDict state;
    for (const auto& item : training.hook().state_dict()) {
      const at::Tensor value = item.value().clone();
      if (item.key().starts_with("error")) context.group().all_reduce(value, ReduceOp::kMean);
      state.insert(item.key(), value);
    }
    if (context.is_main()) lockstep::save({state, {}}, folder + "/expected.safetensors");
  });
}

TEST(HooksInCheckpoints, OtherRanksShareWhatWasNotSentYet) {
  const std::function<CommHookPtr()> makes[] = {[] { return power_sgd_hook({.start_iter = 2}); },
                                                [] { return top_k_hook({.density = 0.1, .start_iter = 2}); },
                                                [] { return bf16_compress_hook(top_k_hook({.density = 0.1})); }};
  for (const auto& make : makes) {
    const TemporaryFolder temporary;
    const std::string folder = temporary.path();
    save_after_ten(2, make, folder);
    run_ranks(3, [&](Context& context) {
      Checkpointed training(context, make(), folder + "/run");
      training.resume();
      const StateDict expected = lockstep::load(folder + "/expected.safetensors").tensors,
                      state = training.hook().state_dict();
      ASSERT_EQ(state.size(), expected.size());
      int errors = 0;
      for (const auto& item : expected) {
        ASSERT_TRUE(state.contains(item.key())) << item.key();
        errors += item.key().starts_with("error") && item.value().abs().max().item<double>() > 0 ? 1 : 0;
        EXPECT_TRUE(at::allclose(state[item.key()], item.value(), 1e-2, 1e-6)) << item.key();
      }
      EXPECT_GT(errors, 0);
      training.train_until(12);
    });
  }
}

}  // namespace
}  // namespace lockstep::hook_checkpoint_test
