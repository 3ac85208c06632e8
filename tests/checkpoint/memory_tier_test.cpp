#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/checkpointer.h>
#include <lockstep/data_loader.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>

#include "base/state_memory.h"
#include "checkpoint/failure.h"
#include "checkpoint/memory/kept_state.h"
#include "data/numbers.h"
#include "support/complaint.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Ranks that end are started again in the same memory, as a launcher does it.

namespace lockstep {
namespace {

using testing::failure;
using testing::run_ranks;

class MemoryTierTest : public ::testing::Test {
 protected:
  MemoryTierTest() { start_anew(); }
  ~MemoryTierTest() override { ::unsetenv("LOCKSTEP_MEMORY_FD"); }

  std::string path() const { return (temporary_.path() / "checkpoints").string(); }

  /// Another launcher.
  void start_anew() {
    memory_ = StateMemory::make();
    ::setenv("LOCKSTEP_MEMORY_FD", std::to_string(memory_.get()).c_str(), 1);
  }
  /// What a launcher does that gives up, and what it needs for that.
  void give_up(const std::string& folder, int64_t step) {
    EXPECT_EQ(newest_step_in_memory(memory_.get()), step);
    const KeptState kept = keep_state(memory_.get(), "", /*is_sound=*/true);
    EXPECT_EQ(kept.problem, "");
    EXPECT_TRUE(kept.written);
    EXPECT_EQ(kept.step, step);
    EXPECT_EQ(std::filesystem::path(kept.path).parent_path(), folder);
    start_anew();
  }
  void test_restarts(bool with_new_launchers);

  TemporaryFolder temporary_;
  FileDescriptor memory_;
};

struct WithNormImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor input) { return out(dropout(norm(hidden(std::move(input))).relu())); }
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(6, 300))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(300))};
  torch::nn::Dropout dropout{register_module("dropout", torch::nn::Dropout(0.3))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(300, 3))};
};
TORCH_MODULE(WithNorm);

/// A training of all kinds of state.
struct Training {
  explicit Training(const Context& context, const std::string& folder, const CheckpointerOptions& options)
      : loader(testing::Numbers(240), context, {.batch_size = 8, .shuffle = true}),
        model(net, context),
        optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2)),
        ema(*net, {.decays = {0.9}}),
        own(at::full({40}, context.rank(), at::kLong)),
        noted(context.rank() == 0 ? 5 : -1),
        checkpointer(folder, context.group(), options) {
    checkpointer.add("model", model)
        .add("optimizer", optimizer)
        .add("ema", ema)
        .add("loader", loader)
        .add("steps", step_);
    checkpointer.add("word", word);
    const auto tensor = [](at::Tensor& value) {
      return Checkpointer::Part{.save = [&value] { return c10::IValue(value); },
                                .load = [&value](const c10::IValue& state) { value = state.toTensor(); }};
    };
    checkpointer.add("own", tensor(own), Checkpointer::Scope::kEachRank);
    checkpointer.add("noted", noted, Checkpointer::Scope::kRankZero);
  }
  void train(int64_t last_step) {
    for (const int epoch : loader.epochs(100)) {
      (void)epoch;
      for (auto& [data, target] : loader) {
        if (step_ == last_step) return;
        optimizer.zero_grad();
        const at::Tensor input = at::rand({data.size(0), 6}) + data.to(at::kFloat).unsqueeze(1) / 240;
        model(input).square().sum().backward();
        optimizer.step();
        ema.update();
        own.add_(1);
        ++noted;
        word += 'x';
        ++step_;
        checkpointer.step(step_);
        if (step_ == last_step) return;
      }
    }
  }
  std::string hash_of_all() {
    StateDict all = with_prefix("model.", state_dict(*net));
    all.update(with_prefix("optimizer.", state_dict(optimizer)));
    all.update(with_prefix("ema.", to_state_dict(ema.state_dict().toGenericDict().at("averages").toList().get(0))));
    all.insert("own", own);
    all.insert("next", at::rand({4}));
    return hash(all) + word + std::to_string(noted);
  }

  WithNorm net;
  DataLoader loader;
  DistributedDataParallel<WithNorm> model;
  torch::optim::AdamW optimizer;
  Ema ema;
  at::Tensor own;
  int64_t noted;
  std::string word;
  int64_t step_ = 0;
  Checkpointer checkpointer;
};

const ContextOptions kSeeded{.seed = 3, .announce = false};

void MemoryTierTest::test_restarts(bool with_new_launchers) {
  for (const int world_size : {1, 2, 3}) {
    const std::string name = path() + std::to_string(world_size);
    const auto note = [&](const Context& context, const char* run) {
      return temporary_.path() / (run + std::to_string(world_size) + "." + std::to_string(context.rank()));
    };
    const auto minute = std::chrono::seconds(60);
    run_ranks(
        world_size,
        [&](Context& context) {
          Training straight(context, name + "straight", {});
          straight.train(13);
          std::ofstream(note(context, "straight")) << straight.hash_of_all();
        },
        minute, kSeeded);
    for (const int64_t last : {5, 6, 13}) {
      if (with_new_launchers && last != 5) give_up(name, last == 6 ? 5 : 6);
      run_ranks(
          world_size,
          [&](Context& context) {
            Training training(context, name, {.memory_every_n_steps = 1});
            EXPECT_EQ(training.checkpointer.resume(), last != 5);
            const int64_t before = last == 5 ? 0 : last == 6 ? 5 : 6;
            EXPECT_EQ(training.checkpointer.resumed_step(), before);
            EXPECT_EQ(training.step_, before);
            training.train(last);
            if (last != 13) return;
            std::string expected;
            std::ifstream(note(context, "straight")) >> expected;
            const std::string got = training.hash_of_all();
            EXPECT_EQ(context.rank() == 0 ? got : got.substr(0, 29),
                      context.rank() == 0 ? expected : expected.substr(0, 29));
          },
          minute, kSeeded);
    }
    EXPECT_EQ(std::filesystem::is_empty(name), !with_new_launchers) << "the ranks save nothing to disk";
  }
}

TEST_F(MemoryTierTest, ARestartEndsWithTheBitsOfAnUndisturbedTraining) { test_restarts(false); }

TEST_F(MemoryTierTest, WhatALauncherThatGivesUpLeavesOnDiskIsAsGood) { test_restarts(true); }

TEST_F(MemoryTierTest, WhatIsLeftInMemoryGoesWhereItBelongsOrElsewhere) {
  const auto save = [&](int64_t step_in_memory, int64_t step_on_disk) {
    run_ranks(2, [&](Context& context) {
      int64_t step = step_in_memory;
      Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
      checkpointer.add("step_count", step);
      checkpointer.step(step);
      if (step_on_disk > 0) checkpointer.save(step = step_on_disk);
      checkpointer.finish();
    });
  };
  const auto files_in = [](const std::string& folder) {
    int64_t count = 0;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder, none))
      count += entry.path().extension() == ".pt";
    return count;
  };
  const std::string other = (temporary_.path() / "other").string();
  EXPECT_EQ(keep_state(memory_.get(), other, true).step, -1) << "nothing was saved";
  EXPECT_EQ(keep_state(-1, other, true).step, -1) << "there is no memory";
  save(3, 4);
  KeptState kept = keep_state(memory_.get(), other, true);
  EXPECT_FALSE(kept.written) << "what is on disk is newer";
  EXPECT_EQ(kept.path_step, 4);
  EXPECT_EQ(files_in(path()), 1);
  save(5, 0);
  kept = keep_state(memory_.get(), other, false);
  EXPECT_TRUE(kept.written);
  EXPECT_EQ(std::filesystem::path(kept.path).parent_path(), other) << "a state that may be wrong is resumed by nobody";
  EXPECT_EQ(files_in(path()), 1);
  // Its folder has gone, and a file lies there.
  std::filesystem::remove_all(path());
  std::filesystem::remove_all(other);
  std::ofstream(path()) << "a file";
  kept = keep_state(memory_.get(), other, true);
  EXPECT_EQ(std::filesystem::path(kept.path).parent_path(), other);
  EXPECT_NE(kept.problem, "");
  kept = keep_state(memory_.get(), "", true);
  EXPECT_EQ(kept.path, "");
  EXPECT_EQ(kept.step, 5);
  EXPECT_NE(kept.problem, "");
}

TEST_F(MemoryTierTest, WhatIsLeftInMemoryIsResumedByAnotherNumberOfRanks) {
  const auto part = [](at::Tensor& value) {
    return Checkpointer::Part{.save = [&value] { return c10::IValue(value); },
                              .load = [&value](const c10::IValue& state) { value.copy_(state.toTensor()); }};
  };
  const auto run = [&](int ranks, const std::function<void(Checkpointer&, at::Tensor&)>& body) {
    run_ranks(ranks, [&](Context& context) {
      at::Tensor big = at::zeros({100'003}), own = at::full({3}, context.rank());
      Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
      checkpointer.add("big", part(big)).add("own", part(own), Checkpointer::Scope::kEachRank);
      body(checkpointer, big);
    });
  };
  run(3, [](Checkpointer& checkpointer, at::Tensor& big) {
    big.copy_(at::arange(100'003));
    checkpointer.step(7);
  });
  give_up(path(), 7);
  run(2, [](Checkpointer& checkpointer, at::Tensor& big) {
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(checkpointer.resumed_step(), 7);
    EXPECT_TRUE(big.equal(at::arange(100'003).to(at::kFloat)));
  });
}

TEST_F(MemoryTierTest, TheNewerOfMemoryAndDiskIsResumed) {
  for (const int64_t on_disk : {2, 4, 6}) {
    const std::string name = path() + std::to_string(on_disk);
    run_ranks(2, [&](Context& context) {
      int64_t step = 0;
      Checkpointer checkpointer(name, context.group(), {.memory_every_n_steps = 2});
      checkpointer.add("step_count", step);
      EXPECT_FALSE(checkpointer.resume()) << "another folder's states are not this one's";
      for (step = 1; step <= on_disk; ++step) checkpointer.step(step);
      checkpointer.save(--step);
      while (++step <= 5) checkpointer.step(step);
      checkpointer.finish();
    });
    run_ranks(2, [&](Context& context) {
      int64_t step = 0;
      Checkpointer checkpointer(name, context.group(), {.memory_every_n_steps = 2});
      checkpointer.add("step_count", step);
      EXPECT_TRUE(checkpointer.resume());
      EXPECT_EQ(checkpointer.resumed_step(), std::max<int64_t>(on_disk, 4));
      EXPECT_EQ(step, std::max<int64_t>(on_disk, 4));
    });
  }
}

TEST_F(MemoryTierTest, WhereWhatIsNewerOnDiskIsDamagedMemoryIsResumed) {
  run_ranks(2, [&](Context& context) {
    int64_t step = 3;
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("step_count", step);
    checkpointer.step(step);
    checkpointer.save(++step);
    checkpointer.finish();
  });
  for (const auto& entry : std::filesystem::directory_iterator(path()))
    if (entry.path().extension() == ".pt") std::fstream(entry.path()).seekp(300) << "damage";
  run_ranks(2, [&](Context& context) {
    int64_t step = 0;
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("step_count", step);
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(step, 3);
  });
}

TEST_F(MemoryTierTest, AnotherNumberOfRanksGoesOnFromWhatIsCommon) {
  int before = 3;
  for (const int world_size : {2, 1, 4}) {
    const auto part = [](at::Tensor& value) {
      return Checkpointer::Part{.save = [&value] { return c10::IValue(value); },
                                .load = [&value](const c10::IValue& state) { value.copy_(state.toTensor()); }};
    };
    const auto run = [&](int ranks, bool resumes) {
      run_ranks(ranks, [&](Context& context) {
        const int64_t step = resumes ? 2 : 1;
        at::Tensor big = at::zeros({100'003}), own = at::full({3}, -1);
        Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
        checkpointer.add("big", part(big)).add("own", part(own), Checkpointer::Scope::kEachRank);
        EXPECT_EQ(checkpointer.resume(), resumes || before != 3);
        if (resumes) {
          EXPECT_TRUE(big.equal(at::arange(100'003).to(at::kFloat)));
          EXPECT_TRUE(own.equal(at::full({3}, -1))) << "each rank's own is left out";
        }
        big.copy_(at::arange(100'003));
        for (int64_t i = 0; i < 3; ++i) checkpointer.step(100 * before + 10 * step + i);
      });
    };
    if (before == 3) run(before, false);
    run(world_size, true);
    before = world_size;
  }
}

TEST_F(MemoryTierTest, AStateMayGrowBetweenSteps) {
  const auto size_at = [](int64_t step) { return step * step * 9'000; };  // far more than the room that is left for it
  run_ranks(3, [&](Context& context) {
    at::Tensor all, own;
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    const auto part = [](at::Tensor& value) {
      return Checkpointer::Part{.save = [&value] { return c10::IValue(value); }, .load = [](const c10::IValue&) {}};
    };
    checkpointer.add("all", part(all)).add("own", part(own), Checkpointer::Scope::kEachRank);
    for (int64_t step = 1; step <= 9; ++step) {
      all = at::full({size_at(step)}, step);
      own = at::full({size_at(step) + context.rank()}, step * 10 + context.rank());
      checkpointer.step(step);
    }
  });
  run_ranks(3, [&](Context& context) {
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    at::Tensor all, own;
    const auto part = [](at::Tensor& value) {
      return Checkpointer::Part{.save = [] { return c10::IValue(); },
                                .load = [&value](const c10::IValue& state) { value = state.toTensor(); }};
    };
    checkpointer.add("all", part(all)).add("own", part(own), Checkpointer::Scope::kEachRank);
    ASSERT_TRUE(checkpointer.resume());
    EXPECT_TRUE(all.equal(at::full({size_at(9)}, 9)));
    EXPECT_TRUE(own.equal(at::full({size_at(9) + context.rank()}, 90 + context.rank())));
  });
}

TEST_F(MemoryTierTest, TheFirstSaveComparesEveryBit) {
  run_ranks(3, [&](Context& context) {
    at::Tensor weights = at::ones({100});
    if (context.rank() == 2) weights[41] = 2;
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("weights", {.save = [&] { return c10::IValue(weights); }, .load = [](const c10::IValue&) {}});
    const std::string text = failure([&] { checkpointer.step(1); });
    EXPECT_NE(text.find("weights on rank 2 differs from that on ranks 0, 1"), std::string::npos) << text;
  });
}

TEST_F(MemoryTierTest, ParametersThatAModelIgnoresAreRankZeros) {
  for (const bool resumes : {false, true}) {
    run_ranks(3, [&](Context& context) {
      torch::nn::Linear net(40, 9);
      DistributedDataParallel<torch::nn::Linear> model(net, context, {.parameters_to_ignore = {"bias"}});
      const at::Tensor weight = at::arange(360).view({9, 40}).to(at::kFloat);
      Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
      checkpointer.add("model", model);
      if (resumes) {
        ASSERT_TRUE(checkpointer.resume());
        EXPECT_TRUE(net->weight.equal(weight));
        EXPECT_TRUE(net->bias.equal(at::full({9}, 5.0F)));
        return;
      }
      at::NoGradGuard no_grad;
      net->weight.copy_(weight);
      net->bias.fill_(5 + context.rank());
      checkpointer.step(1);
    });
  }
}

TEST_F(MemoryTierTest, WithoutALauncherItIsAnErrorOrDiskAlone) {
  ::unsetenv("LOCKSTEP_MEMORY_FD");
  run_ranks(2, [&](Context& context) {
    EXPECT_EQ(
        failure([&] { Checkpointer(path(), context.group(), {.memory_every_n_steps = 1}); }),
        "memory_every_n_steps: rank 0 cannot save to memory: no launcher holds memory for the states of this rank; "
        "start the program by `lockstep run`, or alone with --ranks, without a limit on the size of files (ulimit "
        "-f). To save to disk alone in this case, set disk_if_no_memory = true");
    int64_t step = 0;
    Checkpointer checkpointer(path(), context.group(),
                              {.every_steps = 2, .memory_every_n_steps = 1, .disk_if_no_memory = true});
    checkpointer.add("step_count", step);
    for (step = 1; step <= 3; ++step) EXPECT_EQ(checkpointer.step(step), step == 2);
    checkpointer.finish();
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(step, 2);
  });
}

TEST_F(MemoryTierTest, TooLittleMemoryIsAnErrorWithBothSizesOrDiskAlone) {
  run_ranks(2, [&](Context& context) {
    // Nothing lies behind most of the tensor: it is as large as no machine is, and nobody reads it.
    const at::Tensor vast = at::zeros({1}).expand({4});
    const auto huge = [&] {
      at::Tensor tensor = at::empty({0}, at::kByte);
      tensor.set_(
          c10::Storage(c10::Storage::use_byte_size_t(), size_t{1} << 44, at::DataPtr(vast.data_ptr(), at::kCPU)), 0,
          {int64_t{1} << 44}, {1});
      return tensor;
    };
    Checkpointer::Part part{.save = [&] { return c10::IValue(huge()); }, .load = [](const c10::IValue&) {}};
    {
      Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1});
      checkpointer.add("vast", part);
      const std::string text = failure([&] { checkpointer.step(1); });
      EXPECT_EQ(text.find("no checkpoint in memory: two states in memory take 34078"), 0u) << text;
      EXPECT_NE(text.find(" MiB, but only "), std::string::npos) << text;
    }
    Checkpointer checkpointer(path(), context.group(), {.memory_every_n_steps = 1, .disk_if_no_memory = true});
    checkpointer.add("vast", part);
    EXPECT_EQ(failure([&] {
                checkpointer.step(1);
                checkpointer.step(2);
              }),
              "");
  });
}

TEST_F(MemoryTierTest, MisuseIsNamed) {
  run_ranks(2, [&](Context& context) {
    EXPECT_EQ(testing::complaint([&] { Checkpointer(path(), context.group(), {.memory_every_n_steps = 0}); }),
              "Checkpointer: memory_every_n_steps is 0; it must be at least 1");
    Checkpointer first(path(), context.group(), {.memory_every_n_steps = 1});
    const std::string text = failure([&] { Checkpointer(path() + "2", context.group(), {.memory_every_n_steps = 1}); });
    EXPECT_NE(text.find("another Checkpointer of this process already saves to memory, and only one may"),
              std::string::npos)
        << text;
    const auto alone = context.group().subgroup({1});
    if (!alone) return;
    const std::string other = failure([&] { Checkpointer(path() + "3", *alone, {.memory_every_n_steps = 1}); });
    EXPECT_NE(other.find("the group does not contain all ranks that the launcher started"), std::string::npos) << other;
  });
}

}  // namespace
}  // namespace lockstep
