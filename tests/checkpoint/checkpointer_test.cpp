#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/checkpointer.h>
#include <lockstep/data_loader.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/transforms.h>

#include "checkpoint/failure.h"
#include "checkpoint/random_states.h"
#include "checkpoint/recorded_operations.h"
#include "data/numbers.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;
using testing::Numbers;
using testing::run_ranks;

class CheckpointerTest : public ::testing::Test {
 protected:
  std::string path() const { return (temporary_.path() / "checkpoints").string(); }

  /// The numbers with what a random transform drew for each: sample * 1000 + draw.
  static Transformed augmented(int64_t samples) {
    return Transformed(testing::Numbers(samples), {[](at::Tensor numbers, at::ArrayRef<uint64_t> seeds) {
                         for (size_t i = 0; i < seeds.size(); ++i)
                           numbers[static_cast<int64_t>(i)] =
                               numbers[static_cast<int64_t>(i)] * 1000 + static_cast<int64_t>(seeds[i] % 1000);
                         return numbers;
                       }});
  }
  /// Writes down that this rank has seen the samples.
  void note(const Context& context, const std::string& run, const at::Tensor& samples) const {
    std::ofstream file(temporary_.path() / (run + "." + std::to_string(context.rank())), std::ios::app);
    for (int64_t i = 0; i < samples.numel(); ++i) file << samples[i].item<int64_t>() << '\n';
  }
  /// How often each sample was seen, on all ranks together. Each must have the draw of an uninterrupted epoch.
  void count(const std::string& run, int world_size, std::vector<int>& seen) const {
    DataLoader straight(augmented(static_cast<int64_t>(seen.size())), Shard(0, 1, 5), {.batch_size = 16, .workers = 0});
    straight.set_epoch(1);
    std::set<int64_t> expected;
    for (auto& [data, target] : straight)
      for (int64_t i = 0; i < data.numel(); ++i) expected.insert(data[i].item<int64_t>());
    for (int rank = 0; rank < world_size; ++rank) {
      std::ifstream file(temporary_.path() / (run + "." + std::to_string(rank)));
      for (int64_t value; file >> value;) {
        EXPECT_TRUE(expected.contains(value)) << "sample " << value / 1000 << " was drawn differently";
        ++seen.at(static_cast<size_t>(value / 1000));
      }
    }
  }

  /// Three ranks stop after a random step of an epoch of `samples`; `world_size` ranks do the rest. Returns how often
  /// each sample was seen.
  std::vector<int> split_epoch(int64_t samples, int world_size, unsigned step) {
    constexpr int64_t kBatch = 4;
    const std::string folder = path() + std::to_string(world_size);
    const ContextOptions options{.seed = 5, .announce = false};
    const auto train = [&](Context& context, const std::string& run, int64_t last_step) {
      DataLoader loader(augmented(samples), context, {.batch_size = kBatch, .shuffle = true});
      int64_t steps = 0;
      Checkpointer checkpointer(folder, context.group());
      checkpointer.add("loader", loader).add("steps", steps);
      EXPECT_EQ(checkpointer.resume(), run != "first");
      for (const int epoch : loader.epochs(3)) {
        if (epoch == 2) return;
        for (auto& [data, target] : loader) {
          if (epoch == 1) note(context, run + std::to_string(world_size), data);
          checkpointer.step(++steps);
          if (steps == last_step) {
            checkpointer.save(steps);
            checkpointer.finish();
            return;
          }
        }
      }
    };
    // The run stops in the second epoch.
    const int64_t first_epoch = DataLoader(Numbers(samples), Shard(0, 3, 5), {.batch_size = kBatch}).size();
    run_ranks(
        3, [&](Context& context) { train(context, "first", first_epoch + step); }, std::chrono::seconds(60), options);
    run_ranks(
        world_size, [&](Context& context) { train(context, "second", 0); }, std::chrono::seconds(60), options);
    std::vector<int> seen(static_cast<size_t>(samples));
    count("first" + std::to_string(world_size), 3, seen);
    count("second" + std::to_string(world_size), world_size, seen);
    return seen;
  }

  TemporaryFolder temporary_;
};

TEST_F(CheckpointerTest, AnEpochThatThreeRanksBeganIsEndedByOthersWithEverySampleOnce) {
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  for (const int world_size : {1, 2, 4}) {
    const unsigned step = 1 + chance() % 19;  // of the epoch's 20
    const auto seen = split_epoch(240, world_size, step);
    for (size_t sample = 0; sample < seen.size(); ++sample)
      ASSERT_EQ(seen[sample], 1) << "sample " << sample << ", " << world_size << " ranks, step " << step;
  }
}

TEST_F(CheckpointerTest, WhereSamplesDoNotDivideOnlyThePaddingRepeats) {
  const auto seen = split_epoch(241, 4, 7);
  int repeated = 0;
  for (const int times : seen) {
    ASSERT_GE(times, 1);
    repeated += times - 1;
  }
  EXPECT_EQ(repeated, 3);  // 241 - 84 = 157 left, padded to 160
}

TEST(DataLoaderState, IsWhereTheNextBatchComesFrom) {
  const auto position = [](const DataLoader& loader) {
    const auto state = loader.state_dict().toGenericDict();
    return std::pair(state.at("epoch").toInt(), state.at("samples").toInt());
  };
  using Position = std::pair<int64_t, int64_t>;
  DataLoader loader(Numbers(10), Shard(0, 1), {.batch_size = 4});
  EXPECT_EQ(position(loader), Position(0, 0));
  std::vector<Position> positions;
  for (int epoch : loader.epochs(2)) {
    positions.push_back(position(loader));
    for ([[maybe_unused]] auto& batch : loader) positions.push_back(position(loader));
    EXPECT_EQ(position(loader), Position(epoch + 1, 0));
  }
  EXPECT_EQ(positions, (std::vector<Position>{{0, 0}, {0, 4}, {0, 8}, {1, 0}, {1, 0}, {1, 4}, {1, 8}, {2, 0}}));

  DataLoader other(Numbers(10), Shard(0, 1), {.batch_size = 3});
  auto state = loader.state_dict().toGenericDict().copy();
  state.insert_or_assign("epoch", int64_t{1});
  state.insert_or_assign("samples", int64_t{8});
  other.load_state_dict(state);
  EXPECT_EQ(position(other), Position(1, 8));
  std::vector<int64_t> rest;
  for (auto& [data, target] : other)
    for (int64_t i = 0; i < data.numel(); ++i) rest.push_back(data[i].item<int64_t>());
  EXPECT_EQ(rest, (std::vector<int64_t>{8, 9}));
  EXPECT_EQ(position(other), Position(2, 0));

  DataLoader larger(Numbers(11), Shard(0, 1), {.batch_size = 3});
  EXPECT_NE(failure([&] { larger.load_state_dict(state); }).find("dataset_size was 10, not 11"), std::string::npos);
  state.insert_or_assign("samples", int64_t{11});
  EXPECT_NE(failure([&] { other.load_state_dict(state); }).find("sample 11"), std::string::npos);
}

/// Steps `first` to `last` of a training with dropout and momentum; the hash of the result on rank 0's file.
void train(Context& context, const std::string& folder, bool resume, int64_t last, const std::string& result) {
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5), torch::nn::Linear(8, 1));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  int64_t step = 0;
  double loss_sum = 0;
  Checkpointer checkpointer(folder, context.group(), {.every_steps = 5});
  constexpr auto kScope = Checkpointer::Scope::kRankZero;  // dropout makes the ranks differ
  checkpointer.add("model", *net, kScope).add("optimizer", optimizer, kScope);
  checkpointer.add("step_count", step).add("loss_sum", loss_sum, kScope);
  EXPECT_EQ(checkpointer.resume(), resume);
  EXPECT_EQ(checkpointer.resumed_step(), resume ? 5 : 0);
  while (step < last) {
    optimizer.zero_grad();
    const at::Tensor loss = net->forward(at::ones({2, 4})).pow(2).mean();
    loss.backward();
    optimizer.step();
    loss_sum += loss.item<double>();
    checkpointer.step(++step);
  }
  checkpointer.finish();
  std::ofstream(result + std::to_string(context.rank())) << hash(state_dict(*net)) << ' ' << loss_sum << '\n'
                                                         << at::rand({1}).item<double>();
}

TEST_F(CheckpointerTest, ResumesToTheSameBitsOnEveryRank) {
  const auto content = [&](const std::string& name) {
    std::ifstream file(temporary_.path() / name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const ContextOptions options{.seed = 3, .announce = false};
  const std::string base = temporary_.path().string() + "/";
  // Each rank trains a model of its own, so the model in the checkpoint is rank 0's: only rank 0 is compared, while
  // the random state is each rank's.
  for (const int ranks : {2, 3}) {
    const std::string number = std::to_string(ranks);
    const auto run = [&](const std::string& folder, bool resume, int64_t last, const std::string& result) {
      run_ranks(
          ranks,
          [&](Context& context) { train(context, base + "folder_" + folder + number, resume, last, base + result); },
          std::chrono::seconds(60), options);
    };
    run("straight", false, 8, "straight");
    run("split", false, 5, "half");
    run("split", true, 8, "resumed");
    EXPECT_EQ(content("resumed0"), content("straight0"));
    std::set<std::string> draws;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto draw = [&](const std::string& name) {
        const std::string text = content(name + std::to_string(rank));
        return text.substr(text.find('\n'));
      };
      EXPECT_EQ(draw("resumed"), draw("straight")) << "rank " << rank;
      draws.insert(draw("straight"));
    }
    EXPECT_EQ(draws.size(), static_cast<size_t>(ranks)) << "ranks have the same random state";
    EXPECT_NE(content("half0"), content("straight0"));
  }
}

TEST_F(CheckpointerTest, WritesTheStateOfTheMomentItWasAskedFor) {
  run_ranks(1, [&](Context& context) {
    at::Tensor large = at::full({1 << 20}, 7.0), other = large.view({1024, 1024});
    Checkpointer checkpointer(path(), context.group(), {.keep_last = 5});
    checkpointer.add("tensors",
                     {.save =
                          [&] {
                            return to_object(StateDict({{"large", large}, {"other", other}}));
                          },
                      .load = [&](const c10::IValue& state) { large.copy_(to_state_dict(state)["large"]); }});
    for (int64_t step = 1; step <= 3; ++step) {
      checkpointer.save(step);
      large.add_(1);
    }
    checkpointer.finish();
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_TRUE(at::equal(large, at::full({1 << 20}, 9.0)));
    EXPECT_EQ(checkpointer.resumed_step(), 3);
    const auto whole = load_object(path() + "/step-000000000002.0.pt").toGenericDict();
    const StateDict tensors = to_state_dict(whole.at("tensors"));
    EXPECT_TRUE(at::equal(tensors["large"], at::full({1 << 20}, 8.0)));
    EXPECT_TRUE(tensors["other"].storage().is_alias_of(tensors["large"].storage()));
  });
}

TEST_F(CheckpointerTest, AFullDiskDoesNotStopTrainingAndIsSaidInTheEnd) {
  run_ranks(2, [&](Context& context) {
    double value = 1;
    Checkpointer checkpointer(path(), context.group());
    checkpointer.add("value", value);
    checkpointer.save(1);
    checkpointer.finish();
    {
      testing::FailingOperations full(3, ENOSPC, /*for_good=*/true);
      const ScopedFileOperations in_place(full);
      value = 2;
      checkpointer.save(2);  // training goes on
      const std::string text = failure([&] { checkpointer.finish(); });
      EXPECT_NE(text.find("No space left"), std::string::npos) << text;
      EXPECT_NE(text.find(path()), std::string::npos) << text;
    }
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(value, 1);
    value = 3;
    checkpointer.save(3);
    checkpointer.finish();
    value = 0;
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(value, 3);
  });
}

TEST_F(CheckpointerTest, ReplicasThatDifferAreNotSaved) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](Context& context) {
      const std::string folder = path() + std::to_string(context.world_size());
      torch::nn::Linear net(4, 2);
      DistributedDataParallel model(net, context);
      Checkpointer checkpointer(folder, context.group(), {.every_steps = 2});
      checkpointer.add("model", model);
      EXPECT_FALSE(checkpointer.step(1));
      EXPECT_TRUE(checkpointer.step(2));
      checkpointer.finish();
      if (context.rank() == 1) at::NoGradGuard(), net->bias[1] += 1e-6;
      EXPECT_FALSE(checkpointer.step(3)) << "it is asked at saves alone";
      for (const auto& save :
           std::vector<std::function<void()>>{[&] { checkpointer.step(4); }, [&] { checkpointer.save(4); }}) {
        const std::string text = failure(save);
        EXPECT_NE(text.find("parameter bias on rank 1 differs from that on "), std::string::npos) << text;
      }
      const at::Tensor before = net->bias.detach().clone();
      EXPECT_TRUE(checkpointer.resume());
      EXPECT_EQ(checkpointer.resumed_step(), 2);
      EXPECT_EQ(net->bias.detach().equal(before), context.rank() != 1) << "what all had in common is still there";
      checkpointer.save(5);
      checkpointer.finish();
    });
  }
}

// Averages of weights that each rank had drawn for itself used to be saved as rank 0's without a warning; so was any
// other state.
TEST_F(CheckpointerTest, WhatShouldBeTheSameOnAllRanksIsComparedBeforeASave) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](Context& context) {
      torch::nn::Linear net(4, 2);
      for (auto& parameter : net->parameters()) parameter.data().fill_(0.5);
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      net->forward(at::ones({1, 4})).sum().backward();
      optimizer.step();
      Ema ema(*net);
      double best = std::numeric_limits<double>::quiet_NaN();  // the same as itself
      std::string name = "a";
      const auto failure_of_save = [&](Checkpointer::Scope scope) {
        Checkpointer checkpointer(path() + std::to_string(context.world_size()), context.group(),
                                  {.replace_old_run = true});
        checkpointer.add("net", *net, scope).add("optimizer", optimizer, scope).add("ema", ema, scope);
        checkpointer.add("best", best, scope).add("name", name, scope);
        return failure([&] {
          checkpointer.save(1);
          checkpointer.finish();
        });
      };
      const auto& momentum =
          static_cast<const torch::optim::SGDParamState&>(*optimizer.state().at(net->weight.unsafeGetTensorImpl()));
      const std::map<std::string, std::function<void(bool)>> changes = {
          {"net.bias", [&](bool odd) { net->bias.data().fill_(odd ? 1 : 2); }},
          {"optimizer.state.0.momentum_buffer", [&](bool odd) { momentum.momentum_buffer()[1][3] = odd ? 1 : 2; }},
          {"optimizer.param_groups.0.lr", [&](bool odd) { optimizer.param_groups()[0].options().set_lr(odd ? 1 : 2); }},
          {"best", [&](bool odd) { best = odd ? 1 : 2; }},
          {"name", [&](bool odd) { name = odd ? "b" : "c"; }}};
      const bool odd = context.rank() == 1;
      const std::string rest = " on rank 1 differs from that on " + std::string(ranks == 2 ? "rank 0" : "ranks 0, 2");
      EXPECT_EQ(failure_of_save(Checkpointer::Scope::kAllRanks), "");
      for (const auto& [where, change] : changes) {
        change(odd);
        const std::string text = failure_of_save(Checkpointer::Scope::kAllRanks);
        EXPECT_NE(text.find("the state of step 1 cannot be saved: " + where + rest), std::string::npos) << text;
        EXPECT_NE(text.find("Scope::kEachRank"), std::string::npos) << text;
        EXPECT_EQ(failure_of_save(Checkpointer::Scope::kEachRank), "");
        EXPECT_EQ(failure_of_save(Checkpointer::Scope::kRankZero), "");
        change(false);
        EXPECT_EQ(failure_of_save(Checkpointer::Scope::kAllRanks), "");
      }
      if (odd) net->weight.data().fill_(3);
      Ema other(*net);
      Checkpointer checkpointer(path() + std::to_string(context.world_size()), context.group(),
                                {.replace_old_run = true});
      checkpointer.add("other", other);
      const std::string text = failure([&] { checkpointer.save(1); });
      EXPECT_NE(text.find("other.averages.0.weight" + rest), std::string::npos) << text;
    });
  }
}

TEST_F(CheckpointerTest, AFolderThatCannotBeMadeIsSaidAtOnceOnAllRanks) {
  std::ofstream(temporary_.path() / "file") << "in the way";
  run_ranks(2, [&](Context& context) {
    const std::string text =
        failure([&] { Checkpointer((temporary_.path() / "file" / "below").string(), context.group()); });
    EXPECT_NE(text.find("checkpoints cannot be written: cannot make the folder "), std::string::npos) << text;
  });
}

TEST_F(CheckpointerTest, WhatOneRankCannotSaveAllAreTold) {
  run_ranks(3, [&](Context& context) {
    Checkpointer checkpointer(path(), context.group());
    const auto save = [&]() -> c10::IValue {
      if (context.rank() == 1) throw std::runtime_error("the hook is gone");
      return int64_t{1};
    };
    checkpointer.add("hook", {.save = save, .load = [](const c10::IValue&) {}}, Checkpointer::Scope::kEachRank);
    const std::string text = failure([&] { checkpointer.save(1); });
    EXPECT_NE(text.find("rank 1: the hook is gone"), std::string::npos) << text;
    EXPECT_FALSE(checkpointer.resume());
  });
}

TEST_F(CheckpointerTest, EachRankHasItsOwnWhereTheirNumberIsTheSame) {
  for (const int ranks : {3, 2}) {
    run_ranks(ranks, [&](Context& context) {
      int64_t own = 100 + context.rank(), all = 7;
      Checkpointer checkpointer(path(), context.group());
      checkpointer.add("own", own, Checkpointer::Scope::kEachRank).add("all", all);
      if (context.world_size() == 3) {
        checkpointer.save(1);
        checkpointer.finish();
        own = all = 0;
      } else {
        own = all = -1;
      }
      EXPECT_TRUE(checkpointer.resume());
      EXPECT_EQ(own, context.world_size() == 3 ? 100 + context.rank() : -1);
      EXPECT_EQ(all, 7);
    });
  }
}

TEST_F(CheckpointerTest, ACheckpointOfAnotherProgramIsRefusedWithAllThatDiffers) {
  run_ranks(2, [&](Context& context) {
    torch::manual_seed(1);
    torch::nn::Linear net(2, 3), other(2, 4);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::Adam adam(other->parameters());
    Checkpointer first(path(), context.group());
    first.add("model", *net).add("optimizer", sgd);
    first.save(1);
    first.finish();
    Checkpointer second(path(), context.group());
    int64_t more = 0;
    second.add("model", *other).add("optimizer", adam).add("more", more);
    const std::string text = failure([&] { second.resume(); });
    for (const char* part :
         {"shape of weight: [3, 2] given, [4, 2]", "shape of bias", "param_groups.0.betas is missing",
          "`more`: not in the checkpoint", "rank 1: the same as on rank 0"})
      EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
  });
}

TEST_F(CheckpointerTest, DamagedOnesArePassedOverAndNoneIsAnError) {
  run_ranks(2, [&](Context& context) {
    int64_t value = 0;
    Checkpointer checkpointer(path(), context.group(), {.keep_last = 3});
    checkpointer.add("value", value);
    for (value = 1; value <= 2; ++value) checkpointer.save(value);
    checkpointer.finish();
    const auto damage = [&](const char* name) {
      if (context.is_main())
        std::fstream(path() + '/' + name, std::ios::in | std::ios::out | std::ios::binary).seekp(100).put('?');
      context.group().barrier();
    };
    damage("step-000000000002.0.pt");
    EXPECT_TRUE(checkpointer.resume());
    EXPECT_EQ(value, 1);
    damage("step-000000000001.0.pt");
    const std::string text = failure([&] { checkpointer.resume(); });
    EXPECT_NE(text.find("no checkpoint is intact"), std::string::npos) << text;
  });
}

TEST_F(CheckpointerTest, ByTheClockAllRanksSaveAtTheSameSteps) {
  run_ranks(3, [&](Context& context) {
    Checkpointer checkpointer(path(), context.group(), {.every_minutes = 0.05 / 60});
    int64_t value = 1;
    checkpointer.add("value", value);
    std::string saved;
    // Ranks that are not equally fast, but stop together.
    for (int64_t step = 1; step <= 200; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(context.rank() == 1 ? 2 : 1));
      if (checkpointer.step(step)) saved += std::to_string(step) + ' ';
    }
    checkpointer.finish();
    const auto all = context.group().all_gather_bytes(saved);
    EXPECT_EQ(all[0], all[1]);
    EXPECT_EQ(all[0], all[2]);
    EXPECT_FALSE(saved.empty());
    EXPECT_LT(std::count(saved.begin(), saved.end(), ' '), 100);
  });
}

TEST_F(CheckpointerTest, RefusesNamesThatAreTaken) {
  run_ranks(1, [&](Context& context) {
    Checkpointer checkpointer(path(), context.group());
    int64_t value = 1;
    checkpointer.add("value", value);
    EXPECT_THROW(checkpointer.add("value", value), c10::Error);
    EXPECT_THROW(checkpointer.add("step", value), c10::Error);
    EXPECT_FALSE(checkpointer.step(1));  // neither by steps nor by the clock
  });
}

c10::impl::GenericDict random_states() {
  c10::impl::GenericDict states(c10::AnyType::get(), c10::AnyType::get());
  save_random_states(states, nullptr);
  return states;
}

TEST(RandomStates, OfTheCpuGoOnAndThoseOfDevicesThatAreGoneAreSaid) {
  auto states = random_states();
  const at::Tensor drawn = at::rand({5});
  restore_random_states(states);
  EXPECT_TRUE(at::equal(at::rand({5}), drawn));
  c10::impl::GenericList foreign(c10::AnyType::get());
  for (int device = 0; device < 99; ++device) foreign.push_back(at::zeros({16}, at::kByte));
  states.insert_or_assign(kRandomCuda, foreign);
  ::testing::internal::CaptureStderr();
  restore_random_states(states);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("random states of 99 CUDA devices, but this process sees"), std::string::npos) << text;
  EXPECT_TRUE(at::equal(at::rand({5}), drawn));
}

TEST(RandomStates, OfCudaGoOn) {
  if (!at::hasCUDA()) GTEST_SKIP() << "SKIPPED BECAUSE this LibTorch or this machine has no CUDA";
  const auto options = at::TensorOptions().device(at::kCUDA);
  at::rand({5}, options);
  const auto states = random_states();
  ASSERT_EQ(states.at(kRandomCuda).toList().size(), torch::cuda::device_count());
  const at::Tensor drawn = at::rand({5}, options);
  restore_random_states(states);
  EXPECT_TRUE(at::equal(at::rand({5}, options), drawn));
}

}  // namespace
}  // namespace lockstep
