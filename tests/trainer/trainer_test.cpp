#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;
using testing::run_ranks;

/// Points and what a fixed function makes of them.
class Points : public Dataset {
 public:
  explicit Points(int64_t count)
      : data_(at::sin(at::arange(count * 4, at::kFloat) * 12.9898f).view({count, 4})),
        target_(data_.sum(1, true).mul(3).cos()) {}
  int64_t size() const override { return data_.size(0); }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor chosen = at::tensor(indices, at::kLong);
    return {data_.index_select(0, chosen), target_.index_select(0, chosen)};
  }

 private:
  const at::Tensor data_, target_;
};

/// Its dropout draws random numbers.
struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& points) {
    return last(torch::dropout(torch::tanh(first(points)), 0.2, is_training()));
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(4, 16))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(16, 1))};
};
TORCH_MODULE(Net);

/// What a run came to on one rank.
struct Outcome {
  std::vector<double> losses;         ///< of each batch
  std::vector<at::Tensor> evaluated;  ///< weights that each evaluation saw
  std::vector<double> epoch_losses;
  std::vector<double> scores;
  at::Tensor weights;
  TrainerResult result;
};

/// A model, its data and a Trainer, as a user puts them together.
class Training {
 public:
  static constexpr int64_t kSamples = 50;

  Training(const Context& context, TrainerOptions options,
           DataLoaderOptions loader = {.batch_size = 4, .shuffle = true, .drop_last = true})
      : context_(context),
        train_(Points(kSamples), context, loader),
        test_(Points(7), context, {.batch_size = 2, .exactly_once = true}) {
    options.progress = false;
    torch::manual_seed(7 + static_cast<uint64_t>(context.rank()));
    net = Net();
    optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    trainer.emplace(net.ptr(), *optimizer, context, std::move(options));
    trainer->evaluate_on(test_, metrics, [this](Batch& batch) {
      if (before_evaluation) before_evaluation();
      run.evaluated.push_back(weights());
      error_.update(torch::mse_loss(net(batch.data), batch.target), batch.data.size(0));
    });
    trainer->on_epoch([this](const EpochResult& epoch) {
      run.epoch_losses.push_back(epoch.loss);
      run.scores.push_back(epoch.values.at(0).second);
    });
  }

  const Outcome& fit() {
    run.result = trainer->fit(train_, [this](Batch& batch) {
      const at::Tensor loss = torch::mse_loss(net(batch.data), batch.target);
      run.losses.push_back(loss.item<double>());
      if (before_backward) before_backward();
      return loss;
    });
    run.weights = weights();
    return run;
  }

  at::Tensor weights() const { return torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone(); }

  Net net{nullptr};
  std::optional<torch::optim::SGD> optimizer;
  std::optional<Trainer> trainer;
  Metrics metrics;
  Outcome run;
  std::function<void()> before_backward, before_evaluation;

 private:
  const Context& context_;
  DataLoader train_, test_;
  Mean& error_ = metrics.add("error", Mean());
};

TrainerOptions everything() {
  return {.epochs = 3,
          .accumulate = 2,
          .clip_grad_norm = 0.05,
          .schedule = [](int64_t steps) { return warm_up(2, cosine_annealing_lr(steps - 2)); },
          .ema = EmaOptions{.decays = {0.8}},
          .score = "error",
          .checkpoints = {.higher_is_better = false, .asynchronous = false}};
}

/// What everything() says, written out by hand.
Outcome by_hand(const Context& context, Precision precision) {
  Outcome run;
  DataLoader train(Points(Training::kSamples), context, {.batch_size = 4, .shuffle = true, .drop_last = true});
  torch::manual_seed(7 + static_cast<uint64_t>(context.rank()));
  Net net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  DistributedDataParallel model(net, context);
  Ema ema(*net, {.decays = {0.8}});
  LRScheduler scheduler(optimizer, warm_up(2, cosine_annealing_lr(3 * train.size() / 2 - 2)));
  GradScaler scaler(context.group(), {.enabled = precision == Precision::kHalf});
  const auto forward = [&](Batch& batch) {
    if (precision == Precision::kFloat) return torch::mse_loss(model(batch.data), batch.target);
    const auto guard = autocast({.dtype = precision == Precision::kHalf ? at::kHalf : at::kBFloat16});
    return torch::mse_loss(model(batch.data), batch.target);
  };
  for ([[maybe_unused]] int epoch : train.epochs(3)) {
    const auto accumulation = model.accumulate(2);
    for (auto& batch : train) {
      const at::Tensor loss = forward(batch);
      run.losses.push_back(loss.item<double>());
      scaler.scale(loss / 2).backward();
      if (!accumulation.complete()) continue;
      scaler.unscale(optimizer);
      model.clip_grad_norm(0.05);
      if (scaler.step(optimizer)) {
        scheduler.step();
        ema.update();
      }
      scaler.update();
      optimizer.zero_grad();
    }
    const StateDict averaged = ema.averaged_state();
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : net->named_parameters()) tensors.push_back(averaged[parameter.key()]);
    run.evaluated.push_back(torch::nn::utils::parameters_to_vector(tensors));
  }
  run.weights = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
  return run;
}

class TrainerTest : public ::testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(Context&)>& body) const {
    run_ranks(GetParam(), body, std::chrono::seconds(100), {.seed = 5, .announce = false});
  }
  std::string folder(const std::string& name = "run") const { return (temporary_.path() / name).string(); }

  TemporaryFolder temporary_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, TrainerTest, ::testing::Values(1, 2, 3), ::testing::PrintToStringParamName());

TEST_P(TrainerTest, IsTheHandWrittenLoopToTheBit) {
  on_ranks([](Context& context) {
    for (const Precision precision : {Precision::kFloat, Precision::kBFloat16, Precision::kHalf}) {
      SCOPED_TRACE(static_cast<int>(precision));
      const Outcome hand = by_hand(context, precision);
      TrainerOptions options = everything();
      options.precision = precision;
      Training training(context, options);
      const Outcome& run = training.fit();
      EXPECT_GT(run.losses.size(), 11U);
      EXPECT_EQ(run.losses, hand.losses);
      EXPECT_TRUE(at::equal(run.weights, hand.weights));
      // Every batch of an evaluation sees the averaged weights; a rank may have none.
      for (size_t i = 0; i < run.evaluated.size(); ++i) {
        const size_t epoch = i * hand.evaluated.size() / run.evaluated.size();
        EXPECT_TRUE(at::equal(run.evaluated[i], hand.evaluated[epoch])) << "epoch " << epoch;
      }
      EXPECT_FALSE(run.evaluated.empty());
      EXPECT_EQ(run.result.epochs, 3);
      EXPECT_EQ(run.result.steps, static_cast<int64_t>(run.losses.size() / 2));
      EXPECT_EQ(run.result.stopped_early, "");
      EXPECT_EQ(run.result.best_score, *std::min_element(run.scores.begin(), run.scores.end()));
      assert_equal_across_ranks(context.group(), *training.net);
    }
  });
}

TEST_P(TrainerTest, AnEpochsLossIsTheMeanOverTheSamplesOfAllRanks) {
  on_ranks([](Context& context) {
    Training training(context, {.epochs = 1}, {.batch_size = 4});
    training.net->eval();
    const Outcome& run = training.fit();
    const int64_t samples = (Training::kSamples + context.world_size() - 1) / context.world_size();
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (size_t i = 0; i < run.losses.size(); ++i)
      sum += run.losses[i] * static_cast<double>(std::min<int64_t>(4, samples - 4 * static_cast<int64_t>(i)));
    context.group().all_reduce(sum);
    EXPECT_NEAR(run.epoch_losses.at(0), sum.item<double>() / static_cast<double>(samples * context.world_size()),
                1e-12);
    EXPECT_FALSE(training.net->is_training());
  });
}

TEST_P(TrainerTest, AccumulationEqualsALargerBatch) {
  on_ranks([](Context& context) {
    const auto weights_after = [&](int64_t batch_size, int accumulate) {
      Training training(context, {.epochs = 2, .accumulate = accumulate}, {.batch_size = batch_size, .shuffle = true});
      training.net->eval();  // without dropout
      Outcome run = training.fit();
      return std::pair(run.weights, run.result.steps);
    };
    // The shares of 50, 25 or 17 samples end with fewer batches, and smaller ones.
    const auto [whole, steps] = weights_after(6, 1);
    const auto [parts, steps_of_parts] = weights_after(2, 3);
    EXPECT_EQ(steps, steps_of_parts);
    EXPECT_TRUE(at::allclose(whole, parts, 1e-5, 1e-6)) << (whole - parts).abs().max();
    const auto [other, steps_of_other] = weights_after(2, 2);  // which can tell batches apart
    EXPECT_FALSE(at::allclose(whole, other, 1e-5, 1e-6));
  });
}

TEST_P(TrainerTest, ResumesInTheMiddleAsIfNothingHadBeen) {
  on_ranks([this](Context& context) {
    Training whole(context, everything());
    const Outcome expected = whole.fit();
    const size_t batches_an_epoch = expected.losses.size() / 3;
    TrainerOptions options = everything();
    options.folder = folder();
    options.checkpoints.every_steps = 1;
    const auto stop = [] { throw Error("stopped by the test"); };

    // In the second epoch's second step; then in the evaluation of the third, whose last step is repeated.
    Training first(context, options);
    first.before_backward = [&] { first.run.losses.size() == batches_an_epoch + 3 ? stop() : void(); };
    EXPECT_EQ(failure([&] { first.fit(); }), "stopped by the test");
    first.trainer.reset();  // the folder of checkpoints is one run's at a time
    Training second(context, options);
    second.before_evaluation = [&] { second.run.losses.size() == 2 * batches_an_epoch - 2 ? stop() : void(); };
    EXPECT_EQ(failure([&] { second.fit(); }), "stopped by the test");
    second.trainer.reset();
    Training third(context, options);
    const Outcome end = third.fit();
    third.trainer.reset();

    const std::vector<double> tail(expected.losses.begin() + static_cast<int64_t>(batches_an_epoch) + 2,
                                   expected.losses.end());
    EXPECT_EQ(second.run.losses, tail);
    EXPECT_EQ(end.losses, (std::vector<double>(tail.end() - 2, tail.end())));
    EXPECT_TRUE(at::equal(end.weights, expected.weights));
    EXPECT_EQ(second.run.epoch_losses, std::vector<double>{expected.epoch_losses[1]});
    EXPECT_EQ(end.epoch_losses, std::vector<double>{expected.epoch_losses[2]});
    EXPECT_EQ(end.scores, std::vector<double>{expected.scores[2]});
    EXPECT_EQ(end.result.epochs, 3);
    EXPECT_EQ(end.result.steps, expected.result.steps);
    EXPECT_EQ(end.result.best_epoch, expected.result.best_epoch);
    EXPECT_EQ(end.result.best_score, expected.result.best_score);

    Training nothing_left(context, options);
    const Outcome& none = nothing_left.fit();
    EXPECT_TRUE(none.losses.empty());
    EXPECT_EQ(none.result.epochs, 3);
    EXPECT_TRUE(at::equal(none.weights, expected.weights));
  });
}

TEST_P(TrainerTest, ResumesWhatItsCommHookHasNotSent) {
  on_ranks([this](Context& context) {
    const auto run = [&](const std::string& name, int stop_after, bool hooked) {
      TrainerOptions options = everything();
      options.folder = folder(name);
      options.checkpoints.every_steps = 1;
      Training training(context, options);
      if (hooked) training.trainer->model().register_comm_hook(power_sgd_hook({.start_iter = 1}));
      training.before_backward = [&training, stop_after] {
        if (static_cast<int>(training.run.losses.size()) == stop_after) throw Error("stopped by the test");
      };
      const std::string why = failure([&] { training.fit(); });
      EXPECT_EQ(why, stop_after > 0 ? "stopped by the test" : "");
      return training.weights();
    };
    const at::Tensor expected = run("straight", 0, true);
    EXPECT_EQ(at::equal(run("plain", 0, false), expected), context.world_size() == 1) << "nothing was compressed";
    run("run", 8, true);
    EXPECT_TRUE(at::equal(run("run", 0, true), expected));
  });
}

/// Better on rank 0 in the first two epochs only; on the others each time.
class Opinion : public Metric {
 public:
  explicit Opinion(int rank) : Metric(1), rank_(rank) {}
  void append_values(const std::string& name, MetricValues& values) const override {
    ++asked_;
    values.emplace_back(name, rank_ == 0 && asked_ > 2 ? 0.5 : asked_);
  }

 private:
  const int rank_;
  mutable int asked_ = 0;
};

TEST_P(TrainerTest, AllRanksStopWhereRankZeroDoes) {
  on_ranks([this](Context& context) {
    const auto run_with = [&](int patience) {
      Training training(context, {.epochs = 9, .score = "opinion", .patience = patience, .folder = folder()});
      training.metrics.add("opinion", Opinion(context.rank()));
      return training.fit();
    };
    const Outcome stopped = run_with(3);
    EXPECT_EQ(stopped.result.epochs, 5);
    EXPECT_EQ(stopped.result.best_epoch, 1);
    EXPECT_EQ(stopped.result.best_score, 2);
    EXPECT_EQ(stopped.result.stopped_early, "no better opinion than 2 of epoch 2 in 3 epochs");
    const Outcome again = run_with(3);  // goes on from its checkpoint, and stays stopped
    EXPECT_TRUE(again.losses.empty());
    EXPECT_EQ(again.result.stopped_early, stopped.result.stopped_early);
    EXPECT_EQ(again.result.epochs, 5);
    EXPECT_TRUE(at::equal(again.weights, stopped.weights));
    const Outcome patient = run_with(0);
    EXPECT_EQ(patient.result.epochs, 9);
    EXPECT_EQ(patient.result.stopped_early, "");
  });
}

/// Not a number from the second time on.
class Lost : public Metric {
 public:
  Lost() : Metric(1) {}
  void append_values(const std::string& name, MetricValues& values) const override {
    values.emplace_back(name, asked_++ == 0 ? 1.0 : std::nan(""));
  }

 private:
  mutable int asked_ = 0;
};

TEST_P(TrainerTest, AScoreThatIsNoNumberIsNoBetter) {
  on_ranks([](Context& context) {
    for (const bool higher : {false, true}) {
      Training training(context,
                        {.epochs = 5, .score = "lost", .patience = 2, .checkpoints = {.higher_is_better = higher}});
      training.metrics.add("lost", Lost());
      const Outcome& run = training.fit();
      EXPECT_EQ(run.result.epochs, 3);
      EXPECT_EQ(run.result.best_epoch, 0);
    }
  });
}

TEST_P(TrainerTest, LogsTheRunBesideItsCheckpoints) {
  on_ranks([this](Context& context) {
    TrainerOptions options = everything();
    options.folder = folder();
    options.run_log = RunLogOptions{.tensorboard = false};
    const int64_t steps = [&] {
      Training training(context, options);
      return training.fit().result.steps;
    }();
    std::ifstream file(folder() + "/metrics_rank" + std::to_string(context.rank()) + ".jsonl");
    int64_t losses = 0, scores = 0;
    for (std::string line; std::getline(file, line);) {
      losses += line.find("train/loss") != std::string::npos ? 1 : 0;
      scores += line.find("valid/error") != std::string::npos ? 1 : 0;
    }
    EXPECT_EQ(losses, steps);
    EXPECT_EQ(scores, 3);
  });
}

std::string misuse(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// The Trainer calls the module by its own name; what to() does to it was noticed nowhere, and the replicas parted.
TEST_P(TrainerTest, AModuleThatIsConvertedWhileItTrainsIsAnErrorOnAllRanks) {
  on_ranks([](Context& context) {
    Net net;
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    DataLoader train(Points(24), context, {.batch_size = 2});
    Trainer trainer(net.ptr(), optimizer, context, {.progress = false});
    int steps = 0;
    const auto loss = [&](Batch& batch) {
      if (++steps == 3) net->to(at::kDouble);
      const auto dtype = net->first->weight.scalar_type();
      return torch::mse_loss(net(batch.data.to(dtype)), batch.target.to(dtype));
    };
    const std::string text = failure([&] { trainer.fit(train, loss); });
    EXPECT_NE(text.find("parameter first.weight was converted"), std::string::npos) << text;
    EXPECT_EQ(steps, 3);
  });
}

TEST_P(TrainerTest, RefusesAnOptimizerOverAnotherModel) {
  on_ranks([](Context& context) {
    Net net, other;
    torch::optim::SGD wrong(other->parameters(), 0.1), part(net->last->parameters(), 0.1);
    EXPECT_NE(misuse([&] { Trainer(net.ptr(), wrong, context); }).find("holds no parameter of the module"),
              std::string::npos);
    const Trainer of_a_part(net.ptr(), part, context);
  });
}

// A loader of maps gives the losses, weights and checkpoints that one of data and target gives, to the bit.
TEST_P(TrainerTest, TakesBatchesOfAnyType) {
  struct Examples {
    int64_t size() const { return points.size(); }
    std::map<std::string, at::Tensor> get(int64_t index) const {
      const Batch one = points.get({index});
      return {{"x", one.data[0]}, {"y", one.target[0]}};
    }
    Points points{Training::kSamples};
  };
  on_ranks([this](Context& context) {
    Training training(context, everything());
    const Outcome& expected = training.fit();
    TrainerOptions options = everything();
    options.progress = false;
    options.folder = folder();
    options.checkpoints.every_steps = 1;
    for (const bool resumed : {false, true}) {
      ExampleLoader train(Examples(), context, {.batch_size = 4, .shuffle = true, .drop_last = true});
      ExampleLoader test(Examples{Points(7)}, context, {.batch_size = 2, .exactly_once = true});
      torch::manual_seed(7 + static_cast<uint64_t>(context.rank()));
      Net net;
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      Metrics metrics;
      auto& error = metrics.add("error", Mean());
      Trainer trainer(net.ptr(), optimizer, context, options);
      trainer.evaluate_on(test, metrics, [&](auto& batch) {
        error.update(torch::mse_loss(net(batch["x"]), batch["y"]), batch["y"].size(0));
      });
      std::vector<double> scores;
      trainer.on_epoch([&](const EpochResult& epoch) { scores.push_back(epoch.values.at(0).second); });
      int64_t batches = 0;
      const auto fit = [&] {
        return trainer.fit(train, [&](auto& batch) {
          if (!resumed && ++batches == train.size() + 4) throw Error("stopped by the test");
          return torch::mse_loss(net(batch["x"]), batch["y"]);
        });
      };
      if (!resumed) {
        EXPECT_THROW(fit(), Error);
        EXPECT_EQ(scores.front(), expected.scores.front());
        continue;
      }
      EXPECT_EQ(fit().steps, expected.result.steps);
      EXPECT_EQ(scores.back(), expected.scores.back());
      EXPECT_TRUE(torch::nn::utils::parameters_to_vector(net->parameters()).equal(expected.weights));
    }
  });
}

TEST_P(TrainerTest, SavesItsAveragesByOneCall) {
  on_ranks([this](Context& context) {
    Training training(context, everything());
    training.fit();
    const std::string path = folder("averages.pt");
    training.trainer->save_averages(path);
    context.group().barrier();
    Net other;
    load_state_dict(*other, load(path).tensors);  // strict
    EXPECT_TRUE(torch::nn::utils::parameters_to_vector(other->parameters()).equal(training.run.evaluated.back()));
    EXPECT_FALSE(training.weights().equal(training.run.evaluated.back()));
    EXPECT_THROW(training.trainer->save_averages(path, 1), c10::Error) << "there is one average";
    EXPECT_THROW(training.trainer->save_averages("/no/such/folder/averages.pt"), Error) << "on all ranks";
    Training without(context, {});
    EXPECT_THROW(without.trainer->save_averages(path), c10::Error);
  });
}

/// Options that differ by rank: weights went apart, or ranks waited for each other, without a word.
TEST_P(TrainerTest, OptionsThatDifferAreNamedOnAllRanks) {
  const auto body = [](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    const auto refused = [&](const TrainerOptions& others, const TrainerOptions& mine) {
      Training training(context, odd ? mine : others);
      return failure([&] { training.fit(); });
    };
    const auto expect_named = [&](const TrainerOptions& others, const TrainerOptions& mine, const std::string& part) {
      const std::string text = refused(others, mine);
      EXPECT_NE(text.find("ranks have different options: option"), std::string::npos) << part << text;
      EXPECT_NE(text.find(part), std::string::npos) << part << text;
      EXPECT_NE(text.find("on rank " + std::to_string(context.world_size() - 1)), std::string::npos) << text;
    };
    expect_named({.clip_grad_norm = 1}, {.clip_grad_norm = 0.5}, "`clip_grad_norm: 1` on rank");
    expect_named({}, {.clip_grad_norm = 0.5}, "`clip_grad_norm: none` on rank");
    expect_named({.epochs = 1}, {.epochs = 2}, "`epochs: 2`");
    expect_named({}, {.precision = Precision::kBFloat16}, "precision");
    expect_named({}, {.ema = EmaOptions{}}, "`ema: true`");
    expect_named({.ema = EmaOptions{}}, {.ema = EmaOptions{.decays = {0.9}}}, "ema.decays");
    expect_named({.score = "error"}, {.score = "error", .patience = 2}, "patience");
    expect_named({}, {.schedule = [](int64_t) { return constant_lr(0.5); }}, "`schedule: true`");
    expect_named({.schedule = [](int64_t) { return step_lr(3); }}, {.schedule = [](int64_t) { return step_lr(4); }},
                 "schedule at step 3, for a rate of 1");
    EXPECT_EQ(refused({}, {}), "");
    Training stepping(context, {});
    if (odd) stepping.optimizer->param_groups()[0].options().set_lr(0.05);
    const std::string text = failure([&] { stepping.fit(); });
    EXPECT_NE(text.find("optimizer's group 0, lr: 0.05"), std::string::npos) << text;
  };
  for (const char* backend : {"shm", "gloo"})
    if (GetParam() > 1) run_ranks(testing::Engine{GetParam(), backend}, body);
}

TEST_P(TrainerTest, ResumesWithTheAccumulationOfTheRun) {
  on_ranks([&](Context& context) {
    Training(context, {.epochs = 1, .accumulate = 2, .folder = folder()}).fit();
    const std::string text =
        failure([&] { Training(context, {.epochs = 2, .accumulate = 3, .folder = folder()}).fit(); });
    EXPECT_NE(text.find("accumulate = 2, but this one has 3"), std::string::npos) << text;
    EXPECT_EQ(Training(context, {.epochs = 2, .accumulate = 2, .folder = folder()}).fit().result.epochs, 2);
  });
}

TEST_P(TrainerTest, RefusesWhatMakesNoSense) {
  on_ranks([](Context& context) {
    const auto refused = [&](const TrainerOptions& options) {
      return misuse([&] { Training(context, options).fit(); });
    };
    EXPECT_NE(refused({.epochs = 0}).find("epochs"), std::string::npos);
    EXPECT_NE(refused({.accumulate = 0}).find("accumulate"), std::string::npos);
    EXPECT_NE(refused({.score = "error", .patience = -1}).find("patience is -1"), std::string::npos);
    EXPECT_NE(refused({.patience = 1}).find("without a score"), std::string::npos);
    EXPECT_NE(refused({.score = "acuracy"}).find("`acuracy` is not one of the metrics, error "), std::string::npos);
    torch::optim::SGD optimizer(std::vector<at::Tensor>{at::zeros({1})}, 0.1);
    EXPECT_NE(misuse([&] {
                Trainer(std::make_shared<torch::nn::Module>("empty"), optimizer, context);
              }).find("no parameters to train"),
              std::string::npos);
    Training twice(context, {});
    twice.fit();
    EXPECT_NE(misuse([&] { twice.fit(); }).find("called only once"), std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
