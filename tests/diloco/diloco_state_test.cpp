// States in checkpoints: a run that is resumed at any step of a round has the bits of the undisturbed run.

#include <lockstep/checkpointer.h>

#include "diloco/state_bytes.h"
#include "diloco/training.h"
#include "support/heard_warnings.h"
#include "support/temporary_folder.h"

namespace lockstep::diloco_test {
namespace {

using namespace lockstep::testing;  // NOLINT

const DiLoCoOptions kOptions[] = {
    {.sync_every = 4},
    {.sync_every = 6, .fragments = 3, .overlap_steps = 3, .wire = Wire::kInt8, .error_feedback = true},
    {.sync_every = 5, .fragments = 2, .overlap_steps = 4, .mixing = 0.3, .wire = Wire::kInt4, .error_feedback = true}};

struct Saved {
  Saved(Context& context, const DiLoCoOptions& options, const std::string& folder)
      : training(context, options), checkpointer(folder, context.group(), {.keep_last = 20, .asynchronous = false}) {
    checkpointer.add("model", *training.net, Checkpointer::Scope::kEachRank)
        .add("optimizer", training.optimizer(), Checkpointer::Scope::kEachRank)
        .add("diloco", training.diloco);
  }
  std::string bits() { return training.weights() + outer_hash(training.diloco); }

  Training training;
  Checkpointer checkpointer;
};

TEST(DiLoCoState, ResumesAtAnyStepOfARound) {
  for (const Engine& engine : {Engine{4, "shm", "aaaa"}, Engine{4, "hierarchical", "aabb"},
                               Engine{3, "hierarchical", "aab"}, Engine{3, "gloo", "abc"}})
    for (const DiLoCoOptions& options : kOptions) {
      SCOPED_TRACE(name_of(engine) + " options " + std::to_string(&options - kOptions));
      const TemporaryFolder folder;
      run_ranks(engine, [&](Context& context) {
        Training straight(context, options);
        straight.train_until(16);
        const std::string expected = straight.weights() + outer_hash(straight.diloco);
        for (const int step : {5, 10, 11}) {
          const std::string path = folder.path() / std::to_string(step);
          {
            Saved first(context, options, path);
            first.training.train_until(step);
            first.checkpointer.save(step);
            first.training.train_until(step + 1);
          }
          Saved second(context, options, path);
          ASSERT_TRUE(second.checkpointer.resume());
          EXPECT_EQ(second.training.diloco.stats().steps, step);
          second.training.set_step(step);
          second.training.train_until(16);
          EXPECT_EQ(second.bits(), expected) << "resumed at step " << step;
        }
      });
    }
}

TEST(DiLoCoState, SavingChangesNothing) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    Training straight(context, kOptions[1]), saved(context, kOptions[1]);
    straight.train_until(15);
    for (int step = 1; step <= 15; ++step) {
      saved.train_until(step);
      (void)saved.diloco.state_dict();
    }
    EXPECT_EQ(straight.weights(), saved.weights());
  });
}

TEST(DiLoCoState, OtherRanksOrMachinesGoOnFromTheOuterCopy) {
  const TemporaryFolder folder;
  for (const auto& [before, after] : {std::pair(Engine{4, "hierarchical", "aabb"}, Engine{3, "hierarchical", "aab"}),
                                      std::pair(Engine{3, "hierarchical", "abc"}, Engine{4, "hierarchical", "aabb"}),
                                      std::pair(Engine{2, "gloo", "ab"}, Engine{1, ""}),
                                      std::pair(Engine{2, "hierarchical", "ab"}, Engine{2, "shm", "aa"}),
                                      std::pair(Engine{4, "hierarchical", "aabb"}, Engine{4, "hierarchical", "abab"}),
                                      std::pair(Engine{4, "hierarchical", "aabb"}, Engine{4, "shm", "aaaa"})}) {
    const std::string path = folder.path() / (name_of(before) + after.machines);
    for (const DiLoCoOptions& options : {kOptions[0], kOptions[1]}) {
      const bool overlaps = options.overlap_steps > 0;
      const std::string run = path + (overlaps ? "o" : "");
      run_ranks(before, [&](Context& context) {
        Saved first(context, options, run);
        first.training.train_until(overlaps ? 11 : 8);
        first.checkpointer.save(8);
        if (context.is_main()) lockstep::save(state_dict(*first.training.net), run + ".pt");
      });
      run_ranks(after, [&](Context& context) {
        Saved second(context, options, run);
        ASSERT_TRUE(second.checkpointer.resume());
        second.training.expect_equal(second.training.weights());
        if (!overlaps) {  // a synchronisation has just been
          EXPECT_EQ(second.training.weights(), hash(lockstep::load(run + ".pt").tensors));
        }
        second.training.set_step(overlaps ? 11 : 8);
        second.training.train_until(24);
        second.training.diloco.finish();
        second.training.expect_equal(second.training.weights());
      });
    }
  }
}

TEST(DiLoCoState, ACheckpointOfAllRanksRefusesAModelOfOneMachine) {
  for (const Engine& engine : {Engine{4, "hierarchical", "aabb"}, Engine{2, "gloo", "ab"}}) {
    const TemporaryFolder folder;
    run_ranks(engine, [&](Context& context) {
      Training training(context, {.sync_every = 4});
      training.train_until(2);
      Checkpointer checkpointer(folder.path() / "run", context.group());
      checkpointer.add("model", training.model);
      const auto text_of = [](const std::function<void()>& call) -> std::string {
        try {
          call();
        } catch (const Error& error) {
          return error.what();
        }
        return "nothing";
      };
      for (const std::string& text :
           {text_of([&] { checkpointer.save(1); }), text_of([&] { (void)checkpointer.resume(); })}) {
        EXPECT_NE(text.find("Checkpointer: the model `model` is replicated over rank"), std::string::npos) << text;
        EXPECT_NE(text.find("and its optimizer with Scope::kEachRank"), std::string::npos) << text;
      }
      // One machine may save for itself, whatever the others do.
      Checkpointer own(
          folder.path() /
              std::to_string(context.group().on_this_machine().rank() == 0 ? context.rank() : context.rank() - 1),
          context.group().on_this_machine());
      own.add("model", training.model).save(1);
      EXPECT_THROW(Checkpointer(folder.path() / "run", context.group())
                       .add("diloco", training.diloco, Checkpointer::Scope::kRankZero),
                   c10::Error);
    });
  }
}

TEST(DiLoCoState, ACheckpointWhoseOuterCopyIsLeftOutIsTold) {
  const TemporaryFolder folder;
  const Engine engine{3, "hierarchical", "aab"};
  run_ranks(engine, [&](Context& context) {
    Saved first(context, {.sync_every = 4}, folder.path());
    first.training.train_until(5);
    first.checkpointer.save(5);
  });
  run_ranks(engine, [&](Context& context) {
    Training training(context, {.sync_every = 4});
    Checkpointer checkpointer(folder.path(), context.group());
    checkpointer.add("model", *training.net, Checkpointer::Scope::kEachRank)
        .add("optimizer", training.optimizer(), Checkpointer::Scope::kEachRank);
    const testing::HeardWarnings warnings;
    EXPECT_TRUE(checkpointer.resume());
    if (context.rank() == 0)
      EXPECT_NE(warnings.text().find("parts that this run does not resume: `diloco`."), std::string::npos)
          << warnings.text();
    else
      EXPECT_EQ(warnings.text(), "");
    std::string text;
    try {
      training.diloco.step();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("but its part `diloco`, a DiLoCo's state, was not"), std::string::npos) << text;
  });
  run_ranks(engine, [&](Context& context) {
    Saved second(context, {.sync_every = 4}, folder.path());
    EXPECT_TRUE(second.checkpointer.resume());
    second.training.train_until(9);
    second.training.diloco.finish();
  });
}

/// It trains again when its turn comes, after a resume, and has moved less than on the machines that did not freeze it.
TEST(DiLoCoState, AParameterThatWasFrozenBeforeASaveIsNamedAfterTheResume) {
  const DiLoCoOptions options{.sync_every = 4};
  for (const Engine& engine : {Engine{2, "shm", "aa"}, Engine{2, "hierarchical", "ab"},
                               Engine{3, "hierarchical", "aab"}, Engine{3, "gloo", "abc"}}) {
    SCOPED_TRACE(name_of(engine));
    const TemporaryFolder folder;
    run_ranks(engine, [&](Context& context) {
      const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
      const std::string path = folder.path() / "run";
      {
        Saved first(context, options, path);
        first.training.train_until(1);
        if (last) first.training.net->first->bias.set_requires_grad(false);
        first.training.train_until(2);
        first.training.net->first->bias.set_requires_grad(true);
        first.checkpointer.save(2);
        StateDict state = first.training.diloco.state_dict();
        EXPECT_EQ(state["frozen"].item<int64_t>(), last ? 1 : -1);
        // An earlier version saved none.
        state.erase("frozen");
        Training older(context, options);
        older.diloco.load_state_dict(state);
        older.set_step(2);
        EXPECT_NO_THROW(older.train_until(4));
        // Who goes on from the outer copy has not trained since.
        std::vector<StateDict> ranks;
        for (const std::string& bytes :
             context.group().all_gather_bytes(diloco::bytes_of_state(first.training.diloco.state_dict())))
          ranks.push_back(diloco::state_of_bytes(bytes));
        Training from_ranks(context, options);
        from_ranks.diloco.load_from_ranks(ranks);
        from_ranks.set_step(2);
        EXPECT_NO_THROW(from_ranks.train_until(4));
      }
      Saved second(context, options, path);
      ASSERT_TRUE(second.checkpointer.resume());
      second.training.set_step(2);
      second.training.train_until(3);
      std::string text;
      try {
        second.training.train_until(4);
      } catch (const Error& error) {
        text = error.what();
      }
      const std::string machine = "DiLoCo: parameter first.bias of machine ";
      EXPECT_EQ(text.find(machine), 0u) << text;
      EXPECT_NE(text.find(" was frozen after the DiLoCo was made"), std::string::npos) << text;
      StateDict odd = second.training.diloco.state_dict();
      for (const at::Tensor& wrong :
           {at::tensor({4}, at::kLong), at::tensor({-2}, at::kLong), at::zeros({2}, at::kLong)}) {
        odd["frozen"] = wrong;
        EXPECT_THROW(second.training.diloco.load_state_dict(odd), Error);
      }
    });
  }
}

TEST(DiLoCoState, NesterovCountsOnlyWithMomentum) {
  run_ranks({2, "hierarchical", "ab"}, [](Context& context) {
    const DiLoCoOptions averages{.sync_every = 4, .outer_lr = 1, .outer_momentum = 0, .nesterov = false};
    Training plain(context, averages), local(context, {.sync_every = 4, .outer_lr = 1, .outer_momentum = 0});
    plain.train_until(6);
    local.diloco.load_state_dict(plain.diloco.state_dict());
    EXPECT_EQ(local.diloco.stats().steps, 6);
    DiLoCoOptions odd = averages;
    odd.nesterov = context.rank() == 0;
    EXPECT_NO_THROW(Training(context, odd));
  });
}

TEST(DiLoCoState, StatesOfOtherModelsOrOptionsAreRefused) {
  run_ranks({2, "hierarchical", "ab"}, [](Context& context) {
    Training training(context, kOptions[1]);
    training.train_until(8);
    const StateDict state = training.diloco.state_dict();
    const auto refused = [&](const StateDict& given, DiLoCo& by) {
      const std::string before = hash(by.state_dict());
      std::string text;
      try {
        by.load_state_dict(given);
      } catch (const Error& error) {
        text = error.what();
      }
      EXPECT_EQ(hash(by.state_dict()), before);
      return text;
    };
    Training fragments(context, {.sync_every = 6, .fragments = 2});
    EXPECT_EQ(refused(state, fragments.diloco),
              "the state of DiLoCo has other fragments; set DiLoCoOptions::fragments as in the run that saved it");
    Training feedback(context, {.sync_every = 6, .fragments = 3});
    EXPECT_NE(refused(state, feedback.diloco).find("has [133] as `rest`, and nothing was expected"), std::string::npos);
    DiLoCoOptions changed = kOptions[1];
    changed.sync_every = 9;
    Training rarer(context, changed);
    EXPECT_EQ(
        refused(state, rarer.diloco),
        "the state of DiLoCo was saved with `sync_every 6`, and this one has `sync_every 9`; make the DiLoCo with "
        "the options of the run that saved it");
    changed = kOptions[1];
    changed.outer_momentum = 0;
    Training without_momentum(context, changed);
    EXPECT_NE(refused(state, without_momentum.diloco).find("`outer_momentum 0.9`, and this one has `outer_momentum 0`"),
              std::string::npos);
    torch::nn::Linear other(3, 4);
    DistributedDataParallel model(other, context.group().on_this_machine());
    DiLoCo of_other(model, context);
    EXPECT_EQ(refused(state, of_other),
              "the state of DiLoCo belongs to another model: it has 4 parameters, and this model trains 2");
    StateDict of_another_rank = state;
    of_another_rank["place"] = at::tensor({1 - context.rank(), 2, 0, 1}, at::kLong);
    EXPECT_NE(refused(of_another_rank, training.diloco).find("belongs to another rank"), std::string::npos);
    EXPECT_NE(refused(StateDict(), training.diloco).find("has no `place`"), std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep::diloco_test
