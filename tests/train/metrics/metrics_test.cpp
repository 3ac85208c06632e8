#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn.h>

#include <lockstep/evaluate.h>
#include <lockstep/example_loader.h>
#include <lockstep/gather_for_metrics.h>
#include <lockstep/metrics.h>

#include "checkpoint/failure.h"
#include "data/numbers.h"
#include "support/ranks.h"
#include "train/metrics/counting.h"

namespace lockstep {
namespace {

using testing::failure;
using testing::run_ranks;

// A process whose operators have started threads cannot fork ranks that use some of their own.
const bool kOneThread = (at::set_num_threads(1), true);

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Correct samples by PyTorch's own operators, for scores without ties.
int64_t correct_by_topk(const at::Tensor& scores, const at::Tensor& target, int64_t k) {
  return std::get<1>(scores.topk(k, 1)).eq(target.unsqueeze(1)).any(1).sum().item<int64_t>();
}

TEST(Mean, WeighsByCount) {
  Mean mean;
  EXPECT_TRUE(std::isnan(mean.value()));
  mean.update(2.0, 3);
  mean.update(at::tensor(8.0f), 1);
  EXPECT_DOUBLE_EQ(mean.value(), 3.5);
  mean.update(at::tensor({1.0f, 2.0f, 3.0f}), 2);
  EXPECT_DOUBLE_EQ(mean.value(), 26.0 / 10);
  EXPECT_EQ(mean.count(), 10);
  mean.update(kNaN, 0);  // the mean of an empty batch
  mean.update(at::empty({0}), 4);
  EXPECT_DOUBLE_EQ(mean.value(), 2.6);
  EXPECT_THROW(mean.update(1.0, -1), c10::Error);
  EXPECT_THROW(mean.update(at::Tensor()), c10::Error) << "counted for nothing, as an empty one";
  mean.reset();
  EXPECT_EQ(mean.count(), 0);
}

TEST(Mean, CountsExactlyBeyondWhatFloatsHold) {
  Mean mean;
  for (int i = 0; i < 3; ++i) mean.update(1.0, (int64_t{1} << 50) + 1);
  EXPECT_EQ(mean.count(), 3 * ((int64_t{1} << 50) + 1));
}

TEST(Perplexity, IsTheExponentOfTheMeanLoss) {
  at::manual_seed(1);
  const at::Tensor scores = at::randn({40, 7}), target = at::randint(7, {40}, at::kLong);
  Perplexity perplexity;
  for (int64_t start : {0, 8, 30}) {
    const int64_t end = start == 0 ? 8 : start == 8 ? 30 : 40;
    perplexity.update(at::cross_entropy_loss(scores.slice(0, start, end), target.slice(0, start, end)), end - start);
  }
  const double whole = at::cross_entropy_loss(scores, target).exp().item<double>();
  EXPECT_NEAR(perplexity.value(), whole, 1e-5 * whole);
}

TEST(Accuracy, AgreesWithTopk) {
  at::manual_seed(2);
  const at::Tensor scores = at::randn({500, 9}), target = at::randint(9, {500}, at::kLong);
  for (const int64_t k : {1, 2, 5, 9})
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      Accuracy accuracy({.top_k = k});
      accuracy.update(scores.slice(0, 0, 123).to(dtype), target.slice(0, 0, 123));
      accuracy.update(scores.slice(0, 123).to(dtype).requires_grad_(), target.slice(0, 123));
      EXPECT_EQ(accuracy.correct(), correct_by_topk(scores, target, k)) << "k " << k;
      EXPECT_EQ(accuracy.count(), 500);
    }
  Accuracy half;
  half.update(scores.to(at::kBFloat16), target);
  EXPECT_EQ(half.correct(), scores.to(at::kBFloat16).to(at::kFloat).argmax(1).eq(target).sum().item<int64_t>());
}

TEST(Accuracy, TiesAndNaN) {
  const auto correct = [](std::vector<double> scores, int64_t target, int64_t k = 1) {
    Accuracy accuracy({.top_k = k});
    accuracy.update(at::tensor(scores).unsqueeze(0), at::tensor({target}));
    return accuracy.correct();
  };
  EXPECT_EQ(correct({1, 1, 0}, 0), 1);
  EXPECT_EQ(correct({1, 1, 0}, 1), 0);
  EXPECT_EQ(correct({1, 1, 0}, 1, 2), 1);
  EXPECT_EQ(correct({kNaN, 1, 0}, 1), 0);
  EXPECT_EQ(correct({kNaN, 1, 0}, 1, 2), 1);
  EXPECT_EQ(correct({kNaN, 1, 0}, 0, 2), 0);
  EXPECT_EQ(correct({kNaN, kNaN}, 0, 2), 0);
}

TEST(Accuracy, OfSequencesAndWithoutPadding) {
  at::manual_seed(3);
  const at::Tensor scores = at::randn({6, 20, 11});
  at::Tensor target = at::randint(11, {6, 20}, at::kLong);
  const at::Tensor right = scores.argmax(2).eq(target);
  target.slice(1, 15).fill_(-100);
  Accuracy accuracy;
  accuracy.update(scores.transpose(0, 1), target.transpose(0, 1));
  EXPECT_EQ(accuracy.count(), 6 * 15);
  EXPECT_EQ(accuracy.correct(), right.slice(1, 0, 15).sum().item<int64_t>());
}

TEST(Accuracy, RefusesWhatDoesNotFit) {
  const auto text = [](const at::Tensor& scores, const at::Tensor& target, int64_t k = 1) -> std::string {
    try {
      Accuracy({.top_k = k}).update(scores, target);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  const at::Tensor scores = at::zeros({2, 3}), target = at::zeros({2}, at::kLong);
  EXPECT_EQ(text({}, target),
            "Accuracy: the scores are an undefined tensor; check whether it was moved from or never computed");
  EXPECT_EQ(text(scores, {}),
            "Accuracy: the targets are an undefined tensor; check whether it was moved from or never computed");
  EXPECT_EQ(text(scores, target), "");
  EXPECT_NE(text(scores, at::full({2}, 3, at::kLong)).find("target 3 is not one of 3 classes"), std::string::npos);
  EXPECT_NE(text(scores, at::full({2}, -1, at::kLong)).find("target -1"), std::string::npos);
  EXPECT_NE(text(scores, at::zeros({3}, at::kLong)).find("scores [2, 3] do not go with targets [3]"),
            std::string::npos);
  EXPECT_NE(text(scores, at::zeros({2})).find("targets are Float"), std::string::npos);
  EXPECT_NE(text(target, target).find("scores are Long"), std::string::npos);
  EXPECT_NE(text(scores, target, 4).find("top_k is 4 of 3 classes"), std::string::npos);
  EXPECT_NE(text(scores, target, 0).find("top_k is 0"), std::string::npos);
}

TEST(ConfusionMatrix, CountsAndItsFigures) {
  // Rows are what it is: 3 cats (2 taken for cats), 4 dogs (all 4), 2 hens (1 for a cat, 1 for a dog); no fox, but one
  // cat is taken for one. Figures by hand, as scikit-learn's averages have them.
  ConfusionMatrix matrix(5);
  matrix.update(at::tensor({0, 0, 3, 1, 1, 1, 1, 0, 1}, at::kLong), at::tensor({0, 0, 0, 1, 1, 1, 1, 2, 2}, at::kLong));
  EXPECT_TRUE(at::equal(matrix.counts()[0], at::tensor({2, 0, 0, 1, 0}, at::kLong)));
  EXPECT_TRUE(at::equal(matrix.counts().sum(1), at::tensor({3, 4, 2, 0, 0}, at::kLong)));
  EXPECT_DOUBLE_EQ(matrix.accuracy(), 6.0 / 9);
  EXPECT_DOUBLE_EQ(matrix.precision(0), 2.0 / 3);
  EXPECT_DOUBLE_EQ(matrix.precision(1), 4.0 / 5);
  EXPECT_DOUBLE_EQ(matrix.precision(2), 0);
  EXPECT_DOUBLE_EQ(matrix.recall(0), 2.0 / 3);
  EXPECT_DOUBLE_EQ(matrix.recall(1), 1);
  EXPECT_DOUBLE_EQ(matrix.f1(1), 8.0 / 9);
  EXPECT_EQ(matrix.support(1), 4);
  MetricValues values;
  matrix.append_values("animals", values);
  ASSERT_EQ(values.size(), 4U);
  EXPECT_EQ(values[1].first, "animals_precision");
  EXPECT_DOUBLE_EQ(values[1].second, (2.0 / 3 + 4.0 / 5) / 4);  // of the four classes that occur
  EXPECT_DOUBLE_EQ(values[2].second, (2.0 / 3 + 1) / 4);
  EXPECT_DOUBLE_EQ(values[3].second, (2.0 / 3 + 8.0 / 9) / 4);
  EXPECT_THROW(matrix.update(at::tensor({5}, at::kLong), at::tensor({0}, at::kLong)), c10::Error);
  EXPECT_THROW(matrix.update(at::zeros({1, 4}), at::tensor({0}, at::kLong)), c10::Error);
  EXPECT_THROW(ConfusionMatrix(0), c10::Error);
  EXPECT_THROW(matrix.recall(5), c10::Error);
}

TEST(Counting, IsTheSameByOperatorsAsByLoops) {
  at::manual_seed(4);
  at::Tensor scores = at::randint(6, {300, 8}).to(at::kFloat);  // many ties
  scores.masked_fill_(at::rand({300, 8}) < 0.05, kNaN);
  at::Tensor target = at::randint(8, {300}, at::kLong).masked_fill(at::rand({300}) < 0.1, -100);
  for (const int64_t k : {1, 3, 8}) {
    const auto [correct, counted] = counting::correct_here(scores, target, k, -100);
    EXPECT_TRUE(at::equal(counting::correct_there(scores, target, k, -100),
                          at::tensor({static_cast<double>(correct), static_cast<double>(counted)}, at::kDouble)));
  }
  const at::Tensor predicted = counting::best_here(scores);
  EXPECT_TRUE(at::equal(predicted, scores.argmax(1)));
  std::vector<double> counts(64);
  counting::confusion_here(predicted, target, 8, -100, counts.data());
  EXPECT_TRUE(at::equal(counting::confusion_there(predicted, target, 8, -100), at::tensor(counts, at::kDouble)));
}

/// Counts on "a device", which here is the CPU, as a metric does with tensors of a GPU.
struct Elsewhere : Mean {
  void update_there(double value, double weight) { add(at::tensor({value * weight, weight}, at::kDouble)); }
};

TEST(Metrics, WhatADeviceCountedIsAddedWhenRead) {
  Elsewhere mean;
  mean.update(1.0, 1);
  mean.update_there(4.0, 2);
  mean.update_there(7.0, 1);
  EXPECT_DOUBLE_EQ(mean.value(), 4);
  EXPECT_EQ(mean.count(), 4);
}

TEST(Metrics, SumOverRanksWithUnevenCounts) {
  at::manual_seed(5);
  const at::Tensor scores = at::randn({101, 4}), target = at::randint(4, {101}, at::kLong);
  for (const int ranks : {1, 2, 3})
    run_ranks(ranks, [&](Context& context) {
      Metrics metrics;
      auto& loss = metrics.add("loss", Mean());
      auto& accuracy = metrics.add("accuracy", Accuracy());
      auto& matrix = metrics.add("kinds", ConfusionMatrix(4));
      // Rank 0 has ten samples in one batch, the last rank most; with three ranks the second has none.
      const int64_t split = 10, rank = context.rank(), last = context.world_size() - 1;
      const int64_t start = rank == 0 ? 0 : rank == last ? split : 0;
      const int64_t end = rank == last ? 101 : rank == 0 ? split : 0;
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (int64_t at = start; at < end; at += 32) {
          const at::Tensor some = scores.slice(0, at, std::min(at + 32, end));
          const at::Tensor their = target.slice(0, at, std::min(at + 32, end));
          loss.update(at::cross_entropy_loss(some, their), their.size(0));
          accuracy.update(some, their);
          matrix.update(some, their);
        }
        metrics.reduce(context.group());
        EXPECT_NEAR(loss.value(), at::cross_entropy_loss(scores, target).item<double>(), 1e-6);
        EXPECT_EQ(loss.count(), 101);
        EXPECT_EQ(accuracy.correct(), correct_by_topk(scores, target, 1));
        EXPECT_EQ(accuracy.count(), 101);
        EXPECT_DOUBLE_EQ(matrix.accuracy(), accuracy.value());
        EXPECT_EQ(matrix.counts().sum().item<int64_t>(), 101);
      }
      const MetricValues values = metrics.values();
      ASSERT_EQ(values.size(), 6U);
      EXPECT_EQ(values[1].first, "accuracy");
      EXPECT_EQ(metrics.to_string().substr(0, 6), "loss 1");
      const std::vector<std::string> texts = context.group().all_gather_bytes(metrics.to_string());
      for (const std::string& text : texts) EXPECT_EQ(text, metrics.to_string());
      EXPECT_THROW(metrics.add("loss", Mean()), c10::Error);
    });
}

/// Of the same size, they were summed without a word; of different sizes, the message spoke of bytes.
TEST(Metrics, OnesThatDifferByRankAreNamedOnAllRanks) {
  using Fill = std::function<void(Metrics&)>;
  const auto body = [](Context& context) {
    const int last = context.world_size() - 1;
    const auto expect_named = [&](const Fill& others, const Fill& odd, const std::string& part) {
      Metrics metrics;
      (context.rank() == last ? odd : others)(metrics);
      const std::string text = failure([&] { metrics.reduce(context.group()); });
      EXPECT_NE(text.find("ranks count different things: metric "), std::string::npos) << part << text;
      EXPECT_NE(text.find(part), std::string::npos) << part << text;
      EXPECT_NE(text.find("on rank " + std::to_string(last)), std::string::npos) << text;
    };
    const auto mean = [](const char* name) { return [name](Metrics& m) { m.add(name, Mean()).update(1.0); }; };
    const auto both = [](bool turned) {
      return [turned](Metrics& m) {
        for (const char* name : {turned ? "b" : "a", turned ? "a" : "b"}) m.add(name, Mean()).update(*name);
      };
    };
    expect_named(both(false), both(true), "metric 0 is `a: lockstep::Mean, 2 numbers` on");
    expect_named(
        mean("a"), [](Metrics& m) { m.add("a", Perplexity()); }, "`a: lockstep::Perplexity, 2 numbers` on");
    expect_named(mean("a"), mean("b"), "`b: lockstep::Mean, 2 numbers` on");
    expect_named(mean("a"), both(false), "metric 1 is `nothing (it has 1)` on");
    expect_named([](Metrics& m) { m.add("a", Accuracy()); }, [](Metrics& m) { m.add("a", Accuracy({.top_k = 5})); },
                 "`a: lockstep::Accuracy(top_k 5, ignore_index -100), ");
    expect_named([](Metrics& m) { m.add("a", ConfusionMatrix(3)); },
                 [](Metrics& m) { m.add("a", ConfusionMatrix(30)); },
                 "`a: lockstep::ConfusionMatrix(30 classes, ignore_index -100), ");
    // Ranks that were told can go on; what does not fit into the first message comes whole.
    Metrics metrics;
    auto& matrix = metrics.add("kinds", ConfusionMatrix(30));
    auto& loss = metrics.add("loss", Mean());
    const at::Tensor classes = at::arange(30);
    matrix.update(classes, classes);
    loss.update(context.rank());
    metrics.reduce(context.group());
    EXPECT_TRUE(at::equal(matrix.counts(), at::eye(30, at::kLong) * context.world_size()));
    EXPECT_DOUBLE_EQ(loss.value(), last / 2.0);
  };
  for (const int ranks : {2, 3})
    for (const char* backend : {"shm", "gloo"}) run_ranks(testing::Engine{ranks, backend}, body);
}

// ---- evaluation ----

TEST(Evaluate, IsExactOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 5})
    run_ranks(ranks, [&](Context& context) {
      torch::nn::Sequential model(torch::nn::Linear(1, 1), torch::nn::Dropout(0.5));
      model->train();
      model->children()[0]->eval();
      for (const int64_t size : {1, 2, 7, 64}) {
        DataLoader loader(testing::Numbers(size), context, {.batch_size = 3, .exactly_once = true});
        Metrics metrics;
        auto& mean = metrics.add("mean", Mean());
        for (int round = 0; round < 2; ++round) {
          evaluate(*model, loader, context.group(), metrics, [&](Batch& batch) {
            EXPECT_FALSE(model->is_training() || at::GradMode::is_enabled());
            mean.update(batch.data.to(at::kDouble));
          });
          EXPECT_EQ(mean.count(), size);
          EXPECT_DOUBLE_EQ(mean.value(), static_cast<double>(size - 1) / 2);
        }
      }
      EXPECT_TRUE(model->is_training() && model->children()[1]->is_training());
      EXPECT_FALSE(model->children()[0]->is_training()) << "a part that was frozen has been thawed";
      EXPECT_TRUE(at::GradMode::is_enabled());
    });
}

TEST(Evaluate, TakesBatchesOfAnyType) {
  struct Examples {
    int64_t size() const { return 31; }
    std::map<std::string, at::Tensor> get(int64_t index) const {
      return {{"number", at::full({}, index, at::kDouble)}};
    }
  };
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](Context& context) {
      ExampleLoader loader(Examples(), context, {.batch_size = 4, .exactly_once = true});
      torch::nn::Dropout net;
      Metrics metrics;
      auto& mean = metrics.add("mean", Mean());
      evaluate(*net, loader, context.group(), metrics, [&](auto& batch) {
        EXPECT_FALSE(net->is_training());
        mean.update(batch["number"]);
      });
      EXPECT_DOUBLE_EQ(mean.value(), 15);
      EXPECT_EQ(mean.count(), 31);
    });
  }
}

TEST(Evaluate, ARankThatFailsIsNamedOnTheOthers) {
  run_ranks(3, [&](Context& context) {
    DataLoader loader(testing::Numbers(30), context, {.batch_size = 2, .exactly_once = true});
    Metrics metrics;
    auto& mean = metrics.add("mean", Mean());
    const auto evaluation = [&](int broken) {
      evaluate(loader, context.group(), metrics, [&](Batch& batch) {
        if (context.rank() == broken) throw std::out_of_range("this rank's own trouble");
        mean.update(batch.data.to(at::kDouble));
      });
    };
    if (context.rank() == 1)
      EXPECT_THROW(evaluation(1), std::out_of_range);
    else
      EXPECT_NE(failure([&] { evaluation(1); }).find("because rank 1 failed before"), std::string::npos);
    evaluation(-1);
    EXPECT_DOUBLE_EQ(mean.value(), 14.5);
  });
}

TEST(Evaluate, RefusesALoaderThatRepeats) {
  run_ranks(1, [&](Context& context) {
    DataLoader loader(testing::Numbers(30), context, {.batch_size = 2});
    Metrics metrics;
    EXPECT_THROW(evaluate(loader, context.group(), metrics, [](Batch&) {}), c10::Error);
    DataLoader other(testing::Numbers(30), Shard(1, 2), {.batch_size = 2, .exactly_once = true});
    EXPECT_THROW(evaluate(other, context.group(), metrics, [](Batch&) {}), c10::Error);
  });
}

/// What two processes more than samples make of an evaluation must be one process's, in the dataset's order.
TEST(GatherForMetrics, HasEverySampleOnceInTheDatasetsOrder) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](Context& context) {
      for (const int64_t size : {1, 2, 11, 12, 13, 17}) {
        const auto gathered = [&](DataLoaderOptions options) {
          DataLoader loader(testing::Numbers(size), context, std::move(options));
          std::vector<at::Tensor> all;
          for (auto& [data, target] : loader)
            all.push_back(gather_for_metrics(context.group(), loader, at::stack({data * 2, target}, 1)));
          return at::cat(all);
        };
        const at::Tensor numbers = at::arange(size), expected = at::stack({numbers * 2, numbers}, 1);
        EXPECT_TRUE(gathered({.batch_size = 3}).equal(expected)) << size;
        const at::Tensor shuffled = gathered({.batch_size = 3, .shuffle = true});
        EXPECT_TRUE(std::get<0>(shuffled.sort(0)).equal(expected)) << size;
        if (size >= 3 * ranks) {
          const int64_t whole = size / (3 * ranks) * 3 * ranks;
          EXPECT_TRUE(gathered({.batch_size = 3, .drop_last = true}).equal(expected.narrow(0, 0, whole))) << size;
        }
        EXPECT_TRUE(gathered({.batch_size = 20, .exactly_once = size >= ranks}).equal(expected)) << size;
      }
    });
  }
}

TEST(GatherForMetrics, RowsOfUnevenRanksStandOneAfterTheOther) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](Context& context) {
      const auto rows_of = [](int rank) { return at::full({rank * 2, 3}, rank, at::kFloat); };  // rank 0 has none
      std::vector<at::Tensor> expected;
      for (int rank = 0; rank < context.world_size(); ++rank) expected.push_back(rows_of(rank));
      at::Tensor mine = rows_of(context.rank()).requires_grad_();
      const at::Tensor all = gather_for_metrics(context.group(), mine);
      EXPECT_TRUE(all.equal(at::cat(expected)) && !all.requires_grad());

      const auto expect_error = [&](const at::Tensor& rows, const std::string& part) {
        const std::string text = failure([&] { gather_for_metrics(context.group(), rows); });
        EXPECT_NE(text.find(part), std::string::npos) << text;
      };
      const bool odd = context.rank() == 1;
      expect_error(at::zeros({2, odd ? 4 : 3}), "rank 0 has rows of [3] Float, rank 1 has rows of [4] Float; only");
      expect_error(at::zeros({2}, odd ? at::kLong : at::kFloat), "rank 1 has rows of [] Long");
      expect_error(odd ? at::zeros({}) : at::zeros({2}), "rank 1 has no rows");

      DataLoader loader(testing::Numbers(12), context, {.batch_size = 2});
      for (auto& [data, target] : loader) {
        const at::Tensor rows = odd ? data.narrow(0, 0, 1) : data;
        const std::string text = failure([&] { gather_for_metrics(context.group(), loader, rows); });
        EXPECT_NE(text.find("rank 1 has 1 rows for a batch of 2 samples"), std::string::npos) << text;
        break;
      }
      DataLoader uneven(testing::Numbers(2 * ranks + 1), context, {.batch_size = 2, .exactly_once = true});
      for (auto& [data, target] : uneven) {
        EXPECT_THROW(gather_for_metrics(context.group(), uneven, data), c10::Error);
        break;
      }
    });
  }
}

}  // namespace
}  // namespace lockstep
