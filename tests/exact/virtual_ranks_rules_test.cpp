#include <limits>
#include <set>

#include "exact/training.h"

// What virtual ranks promise besides equal bits of an undisturbed run, and what they refuse.

namespace lockstep::exact {
namespace {

/// The text of what `body` throws; "" if it throws nothing.
std::string complaint_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

const ContextOptions kSixOfThem{.seed = 7, .virtual_ranks = 6, .announce = false};
constexpr std::chrono::seconds kDeadline{60};

// ---- resuming ----

std::string resumed(int first_on, int then_on, const Case& one) {
  TemporaryFolder folder;
  const auto with_checkpoints = [&](int from, int to) {
    return [&folder, from, to](Context& context, Training& training) {
      Checkpointer checkpointer(folder.path() / "kept", context.group());
      checkpointer.add("model", training.model()).add("optimizer", training.optimizer());
      checkpointer.add("loader", training.loader());
      EXPECT_EQ(checkpointer.resume(), from > 0);
      training.go_on_from(from);
      training.run(to);
      checkpointer.save(to);
      checkpointer.finish();
      return training.result();
    };
  };
  run_on(first_on, one, with_checkpoints(0, 5));
  return run_on(then_on, one, with_checkpoints(5, 10));
}

TEST(VirtualRanksAreResumed, OnAnotherNumberOfRanks) {
  const Case one{.name = "", .virtual_ranks = 6, .kind = Kind::kResNet, .adamw = true, .steps = 10};
  const std::string whole = run_on(3, one);
  const std::string last = whole.substr(whole.find("1005 "));
  EXPECT_EQ(resumed(3, 2, one), last);
  EXPECT_EQ(resumed(1, 3, one), last);
}

TEST(VirtualRanksAreResumed, OnlyIfTheirNumberAndThreadsAreEqual) {
  TemporaryFolder folder;
  const auto run = [&](ContextOptions options, const std::string& expected) {
    options.seed = 1;
    options.announce = false;
    testing::run_ranks(
        2,
        [&](Context& context) {
          int64_t number = 1;
          Checkpointer checkpointer(folder.path() / "kept", context.group());
          checkpointer.add("number", number);
          const std::string complaint = complaint_of([&] { checkpointer.resume(); });
          if (!expected.empty()) return expect_in(complaint, expected);
          EXPECT_EQ(complaint, "");
          checkpointer.save(1);
          checkpointer.finish();
        },
        kDeadline, options);
  };
  run({.virtual_ranks = 4}, "");
  run({.virtual_ranks = 4}, "");
  run({.virtual_ranks = 6}, "by a run with 4 virtual ranks, but this run has 6 virtual ranks");
  run({}, "by a run with 4 virtual ranks, but this run has no virtual ranks");
  run({.virtual_ranks = 4, .threads = 2}, "by ranks with 1 threads each, but these ranks have 2");
}

TEST(VirtualRanksAreResumed, NotWithinAStep) {
  testing::run_ranks(
      2,
      [](Context& context) {
        DataLoader loader(Waves({2}), context, {.batch_size = 2});
        auto batch = loader.begin();
        expect_in(complaint_of([&] { loader.state_dict(); }), "within a step");
        ++ ++batch;
        EXPECT_EQ(loader.state_dict().toGenericDict().at("samples").toInt(), 12);
      },
      kDeadline, kSixOfThem);
}

// ---- data ----

TEST(VirtualRanksData, IsThatOfAsManyRanks) {
  std::vector<std::vector<int64_t>> expected;
  for (int v = 0; v < 6; ++v) {
    DistributedSampler sampler(100, Shard(v, 6, 7), {.shuffle = true});
    expected.push_back(sampler.indices());
  }
  struct Indices : Dataset {
    int64_t size() const override { return 100; }
    Batch get(at::ArrayRef<int64_t> indices) const override {
      return {.data = at::tensor(indices, at::kLong), .target = {}};
    }
  };
  for (const int ranks : {1, 2, 3})
    testing::run_ranks(
        ranks,
        [&](Context& context) {
          DataLoader loader(Indices(), context, {.batch_size = 2, .accumulate = 2, .shuffle = true});
          const auto [first, last] = context.virtual_block();
          EXPECT_EQ(loader.size(), (last - first) * 9);  // 17 samples each
          std::vector<std::vector<int64_t>> got(6);
          int64_t number = 0;
          for (auto& batch : loader) {
            const auto v = static_cast<size_t>(first + number++ / 2 % (last - first));
            if (number > (last - first) * 8) break;  // the last batches are smaller
            for (const int64_t index : std::vector<int64_t>(batch.data.data_ptr<int64_t>(),
                                                            batch.data.data_ptr<int64_t>() + batch.data.numel()))
              got[v].push_back(index);
          }
          for (int v = first; v < last; ++v) {
            auto want = expected[static_cast<size_t>(v)];
            want.resize(16);
            EXPECT_EQ(got[static_cast<size_t>(v)], want) << "virtual rank " << v;
          }
        },
        kDeadline, kSixOfThem);
}

// ---- steps ----

struct TwoLayersImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 4))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(4, 2))};
};
TORCH_MODULE(TwoLayers);

at::Tensor input(int v, int step) { return torch::sin(torch::arange(6, torch::kFloat).view({2, 3}) * (v + 2) + step); }

using Model = DistributedDataParallel<TwoLayers>;

/// A step without a loader; `micro` computes what belongs to one virtual rank.
void step_of(Context& context, Model& model, torch::optim::Optimizer& optimizer,
             const std::function<void(int v)>& micro) {
  const auto [first, last] = context.virtual_block();
  for (int v = first; v < last; ++v) {
    EXPECT_TRUE(v == first || !model.step_complete());
    context.enter_virtual_rank(v);
    micro(v);
  }
  EXPECT_TRUE(model.step_complete());
  optimizer.step();
  optimizer.zero_grad();
}

/// The hash of the parameters after the steps of `train`, equal on all ranks and all numbers of them.
void expect_same_hash(const std::vector<int>& numbers,
                      const std::function<void(Context&, Model&, torch::optim::Optimizer&)>& train,
                      ContextOptions options = kSixOfThem) {
  std::set<std::string> hashes;
  for (const int ranks : numbers) {
    TemporaryFolder folder;
    testing::run_ranks(
        ranks,
        [&](Context& context) {
          TwoLayers net;
          const std::string before = hash(state_dict(*net));
          Model model(net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
          torch::optim::SGD optimizer(net->parameters(), 0.1);
          train(context, model, optimizer);
          model.check_divergence();
          EXPECT_NE(hash(state_dict(*net)), before);
          std::ofstream(folder.path() / std::to_string(context.rank())) << hash(state_dict(*net));
        },
        kDeadline, options);
    for (int rank = 0; rank < ranks; ++rank) {
      std::ifstream file(folder.path() / std::to_string(rank));
      hashes.insert({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
    }
  }
  EXPECT_EQ(hashes.size(), 1u);
}

TEST(VirtualRanksSteps, SkipNonFiniteGradientsOfAny) {
  expect_same_hash({1, 2, 3, 6}, [](Context& context, Model& model, torch::optim::Optimizer& optimizer) {
    model.set_non_finite_policy(NonFinitePolicy::kSkip);
    for (int step = 0; step < 5; ++step)
      step_of(context, model, optimizer, [&](int v) {
        const double scale = step == 2 && v == 4 ? std::numeric_limits<double>::infinity() : 1;
        (model(input(v, step)).square().mean() * scale).backward();
      });
    EXPECT_EQ(model.skipped_steps(), 1);
  });
}

TEST(VirtualRanksSteps, LeaveOutThoseThatFailInForwardAndNoneThatFailsInBackward) {
  expect_same_hash({1, 2, 3}, [](Context& context, Model& model, torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < 4; ++step)
      step_of(context, model, optimizer, [&](int v) {
        try {
          at::Tensor hidden = torch::tanh(model->first(input(v, step)));
          if (step == 1 && v == 2) throw std::runtime_error("in forward");
          if (step == 2 && v == 1)
            hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw Error("in backward"); });
          model->second(hidden).square().mean().backward();
        } catch (const std::exception&) {
          model.skip_step();
        }
      });
    EXPECT_EQ(model.skipped_steps(), 1);
  });
}

TEST(VirtualRanksSteps, JoinThoseThatHaveMoreInputs) {
  expect_same_hash({1, 2, 3, 6}, [](Context& context, Model& model, torch::optim::Optimizer& optimizer) {
    const auto [first, last] = context.virtual_block();
    const auto finish = [&] {
      if (!model.step_complete()) return;
      optimizer.step();
      optimizer.zero_grad();
    };
    model.join(
        [&] {
          for (int step = 0; step < 5; ++step)
            for (int v = first; v < last; ++v) {
              if (step >= (v < 2 ? 5 : 4)) break;
              context.enter_virtual_rank(v);
              model(input(v, step)).square().mean().backward();
              finish();
            }
        },
        {.divide_by_initial_world_size = false, .shadow = finish});
  });
}

TEST(VirtualRanksSteps, JoinThoseWhoseInputsEndWithinAnAccumulation) {
  expect_same_hash({1, 2, 3, 6}, [](Context& context, Model& model, torch::optim::Optimizer& optimizer) {
    const auto [first, last] = context.virtual_block();
    const auto finish = [&] {
      if (!model.step_complete()) return;
      optimizer.step();
      optimizer.zero_grad();
    };
    model.join(
        [&] {
          const auto accumulation = model.accumulate(3);
          for (int begin = 0; begin < 6; begin += 3)
            for (int v = first; v < last; ++v)
              for (int pass = begin; pass < std::min(begin + 3, v < 4 ? 5 : 3); ++pass) {
                context.enter_virtual_rank(v);
                model(input(v, pass)).square().mean().backward();
                finish();
              }
          if (!model.step_complete()) {
            model.reduce_gradients();
            finish();
          }
        },
        {.shadow = finish});
  });
}

TEST(VirtualRanksSteps, ReduceWhatIsLeftOfAnAccumulation) {
  expect_same_hash({1, 2, 6}, [](Context& context, Model& model, torch::optim::Optimizer& optimizer) {
    const auto accumulation = model.accumulate(3);
    const auto [first, last] = context.virtual_block();
    for (int v = first; v < last; ++v)
      for (int pass = 0; pass < 2; ++pass) {
        context.enter_virtual_rank(v);
        model(input(v, pass)).square().mean().backward();
      }
    EXPECT_FALSE(accumulation.complete());
    model.reduce_gradients();
    EXPECT_TRUE(accumulation.complete());
    optimizer.step();
  });
}

TEST(VirtualRanksSteps, AreInOrder) {
  testing::run_ranks(
      2,
      [](Context& context) {
        TwoLayers net;
        Model model(net, context);
        const int first = context.virtual_block().first;
        context.enter_virtual_rank(first);
        model(input(0, 0)).mean().backward();
        model(input(0, 0)).mean().backward();  // again of the first one
        context.enter_virtual_rank(first + 2);
        expect_in(complaint_of([&] { model(input(0, 0)).mean().backward(); }),
                  "a backward came from the micro-batch of virtual rank " + std::to_string(0));
      },
      kDeadline, kSixOfThem);
}

/// The generator's loss goes through the critic, whose own gradients from it nobody wants: they are reduced and
/// dropped, or kept local and dropped.
TEST(VirtualRanksSteps, OfTwoNetsOfWhichOneReachesTheOther) {
  for (const bool keeps_local : {false, true}) {
    std::set<std::string> hashes;
    for (const int ranks : {1, 2, 3, 4}) {
      TemporaryFolder folder;
      testing::run_ranks(
          ranks,
          [&](Context& context) {
            TwoLayers generator;
            torch::nn::Sequential critic(torch::nn::Linear(2, 5), torch::nn::Tanh(), torch::nn::Linear(5, 1));
            Model g(generator, context);
            DistributedDataParallel<torch::nn::Sequential> c(critic, context);
            torch::optim::SGD g_optimizer(generator->parameters(), 0.1), c_optimizer(critic->parameters(), 0.1);
            const auto [first, last] = context.virtual_block();
            for (int step = 0; step < 4; ++step) {
              for (int v = first; v < last; ++v) {
                context.enter_virtual_rank(v);
                const at::Tensor made = generator(input(v, step)).detach();
                (critic->forward(made).mean() - critic->forward(torch::rand({2, 2})).mean()).backward();
              }
              EXPECT_TRUE(c.step_complete());
              c_optimizer.step(), c_optimizer.zero_grad();
              for (int round = 0; round < 1 + step % 2; ++round) {
                const auto guard = keeps_local ? std::make_unique<NoSyncGuard>(c.no_sync()) : nullptr;
                for (int v = first; v < last; ++v) {
                  context.enter_virtual_rank(v);
                  (-critic->forward(generator(input(v, step + 10))).mean()).backward();
                }
                EXPECT_TRUE(g.step_complete());
                g_optimizer.step(), g_optimizer.zero_grad(), c_optimizer.zero_grad();
              }
            }
            g.check_divergence(), c.check_divergence();
            std::ofstream(folder.path() / std::to_string(context.rank()))
                << hash(state_dict(*generator)) << ' ' << hash(state_dict(*critic));
          },
          kDeadline, {.seed = 7, .virtual_ranks = 4, .announce = false});
      for (int rank = 0; rank < ranks; ++rank) {
        std::ifstream file(folder.path() / std::to_string(rank));
        hashes.insert({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
      }
    }
    EXPECT_EQ(hashes.size(), 1u) << (keeps_local ? "local" : "reduced");
  }
}

TEST(VirtualRanksSteps, NeedOneThatWasEntered) {
  for (const int virtual_ranks : {2, 4})
    for (const int ranks : {1, 2})
      testing::run_ranks(ranks,
                         [](Context& context) {
                           TwoLayers net;
                           Model model(net, context);
                           const auto [first, last] = context.virtual_block();
                           expect_in(complaint_of([&] {
                                       for (int v = first; v < last; ++v) model(input(v, 0)).mean().backward();
                                     }),
                                     "a backward ran before this rank had entered a virtual rank");
                         },
                         kDeadline, {.seed = 7, .virtual_ranks = virtual_ranks, .announce = false});
}

// ---- the kit around it ----

void expect_same_text(const std::vector<int>& numbers, const std::function<std::string(Context&)>& body) {
  std::set<std::string> texts;
  for (const int ranks : numbers) {
    TemporaryFolder folder;
    testing::run_ranks(
        ranks,
        [&](Context& context) {
          const std::string text = body(context);
          EXPECT_NE(text, "");
          if (context.is_main()) std::ofstream(folder.path() / "text") << text;
        },
        kDeadline, kSixOfThem);
    std::ifstream file(folder.path() / "text");
    texts.insert({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
  }
  EXPECT_EQ(texts.size(), 1u) << *texts.begin() << " / " << *texts.rbegin();
}

TEST(VirtualRanksKit, MetricsAddAlongTheTree) {
  expect_same_text({1, 2, 3, 4, 6}, [](Context& context) {
    Metrics metrics;
    auto& mean = metrics.add("mean", Mean());
    auto& other = metrics.add("other", Mean());
    DataLoader loader(Waves({3}), context, {.batch_size = 7, .exactly_once = true});
    std::string text;
    for (int pass = 0; pass < 2; ++pass) {
      evaluate(loader, context.group(), metrics, [&](Batch& batch) {
        mean.update(batch.data.sum().item<double>() / 3, batch.data.size(0));
        if (batch.target.size(0) > 1) other.update(batch.data, 1);
      });
      EXPECT_EQ(mean.count(), 4000);
      text += bits_of(mean.value()) + ' ' + bits_of(other.value()) + ' ';
    }
    return text;
  });
}

TEST(VirtualRanksKit, TheTrainerTakesAStepOfAll) {
  expect_same_text({1, 2, 3}, [](Context& context) {
    Net net(Kind::kMlp);
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    Trainer trainer(net.ptr(), optimizer, context, {.epochs = 1, .accumulate = 2, .progress = false});
    DataLoader loader(Waves({12}), context, {.batch_size = 30, .accumulate = 2, .drop_last = true});
    const auto result =
        trainer.fit(loader, [&](Batch& batch) { return torch::cross_entropy_loss(net(batch.data), batch.target); });
    EXPECT_EQ(result.steps, 11);  // 22 batches of each
    return hash(state_dict(*net));
  });
}

TEST(VirtualRanksKit, SynchronisedBatchNormHasTheSameBitsOnEveryEngine) {
  for (const int ranks : {2, 3}) {
    std::set<std::string> texts;
    for (const char* engine : {"shm", "gloo", "hierarchical"}) {
      TemporaryFolder folder;
      testing::run_ranks(
          ranks,
          [&](Context& context) {
            Net net(Kind::kResNet);
            EXPECT_EQ(convert_sync_batchnorm(*net, context.group()), 2);
            DistributedDataParallel model(net, context);
            torch::optim::SGD optimizer(net->parameters(), 0.05);
            DataLoader loader(Waves({2, 6, 6}), context, {.batch_size = 3, .shuffle = true, .drop_last = true});
            int step = 0;
            for (auto& [data, target] : loader) {
              torch::cross_entropy_loss(model(data), target).backward();
              optimizer.step();
              optimizer.zero_grad();
              if (++step == 20) break;
            }
            if (context.is_main()) std::ofstream(folder.path() / "text") << hash(state_dict(*net));
          },
          kDeadline, {.seed = 7, .virtual_ranks = ranks, .backend = engine, .announce = false},
          std::string(engine) == "hierarchical" ? std::string("aab").substr(3 - static_cast<size_t>(ranks)) : "");
      std::ifstream file(folder.path() / "text");
      texts.insert({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
    }
    EXPECT_EQ(texts.size(), 1u) << ranks << " ranks";
    EXPECT_EQ(texts.count(""), 0u);
  }
}

// ---- threads ----

TEST(VirtualRanksThreads, AreOneUnlessTheProgramOrItsEnvironmentSays) {
  const auto expect_threads = [](int threads, ContextOptions options) {
    for (const int ranks : {1, 2, 3})
      testing::run_ranks(
          ranks,
          [&](Context& context) {
            EXPECT_EQ(context.threads(), threads);
            EXPECT_EQ(at::get_num_threads(), threads);
          },
          kDeadline, options);
  };
  ::unsetenv("OMP_NUM_THREADS");
  expect_threads(1, kSixOfThem);
  expect_threads(2, {.virtual_ranks = 6, .threads = 2, .announce = false});
  ::setenv("LOCKSTEP_VIRTUAL_RANKS", "6", 1);
  expect_threads(1, {.announce = false});
}

// ---- refusals ----

TEST(VirtualRanksRefuse, FewerThanRanks) {
  testing::run_ranks(3, [](Context& context) {
    EXPECT_EQ(context.virtual_ranks(), 0);
    expect_in(complaint_of([&] { context.enter_virtual_rank(0); }), "no virtual ranks");
  });
  ::setenv("LOCKSTEP_VIRTUAL_RANKS", "2", 1);
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "3", 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", "1", 1);
  expect_in(complaint_of([] { Context context; }),
            "there are 3 ranks for 2 virtual ranks, and each rank needs at least one; start 2 ranks at most, or raise "
            "LOCKSTEP_VIRTUAL_RANKS");
  expect_in(complaint_of([] { Context context({.virtual_ranks = 1}); }), "or raise ContextOptions::virtual_ranks");
  ::setenv("LOCKSTEP_VIRTUAL_RANKS", "many", 1);
  expect_in(complaint_of([] { Context context; }), "LOCKSTEP_VIRTUAL_RANKS=many is not a number");
}

TEST(VirtualRanksRefuse, NumbersThatDifferByRank) {
  for (const char* backend : {"shm", "gloo"})
    for (const int world_size : {2, 3})
      for (const int other : {0, 8})
        testing::run_ranks(world_size, [&](Context& context) {
          const int last = context.world_size() - 1;
          const bool odd = context.rank() == last;
          { const Context gone = std::move(context); }  // run_ranks gives all ranks the same options
          const std::string said = complaint_of([&] {
            const Context again({.seed = 7, .virtual_ranks = odd ? other : 6, .backend = backend, .announce = false});
          });
          EXPECT_EQ(said, "ContextOptions::virtual_ranks is " + std::to_string(other) + " on rank " +
                              std::to_string(last) + " and 6 on rank 0; set it alike on all ranks");
        });
}

TEST(VirtualRanksRefuse, WhatBelongsToAProcess) {
  testing::run_ranks(
      2,
      [](Context& context) {
        TwoLayers net;
        Model model(net, context);
        expect_in(complaint_of([&] { model.register_comm_hook(power_sgd_hook()); }),
                  "cannot be used with virtual ranks");
        expect_in(complaint_of([&] { model.register_comm_hook(top_k_hook()); }), "cannot be used with virtual ranks");
        torch::nn::BatchNorm1d norm(3);
        expect_in(complaint_of([&] { DistributedDataParallel mean(norm, context, {.buffers = BufferPolicy::kMean}); }),
                  "buffers follow virtual rank 0");
        expect_in(complaint_of([&] { convert_sync_batchnorm(*norm, context.group()); }),
                  "a synchronised batch norm needs the batches of all 6 virtual ranks at once");
      },
      kDeadline, kSixOfThem);
}

}  // namespace
}  // namespace lockstep::exact
