#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "observe/events/event_reader.h"
#include "rank_page/rank_board.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Where a rank works for several virtual ranks, what is shown and recorded is of steps of the optimizer and of all
// their samples, whether or not the virtual ranks can be shared out evenly.

namespace lockstep::counted_steps_test {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::run_ranks;

constexpr int kVirtualRanks = 4, kEpochs = 2, kAccumulate = 2, kBatch = 4;
constexpr int64_t kSamples = 64;  // four batches of each virtual rank: two steps of two

class Points : public Dataset {
 public:
  explicit Points(int64_t count) : count_(count) {}
  int64_t size() const override { return count_; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor x = at::tensor(indices, at::kLong).to(at::kFloat).unsqueeze(1);
    return {at::cat({x.sin(), x.cos()}, 1), x.mul(0.1).cos()};
  }

 private:
  const int64_t count_;
};

struct Recorded {
  int64_t samples = 0;
  std::vector<double> losses;
};

Recorded read_metrics(const std::string& path) {
  std::ifstream file(path);
  Recorded found;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json["type"] == "steps") found.samples += json["samples"].get<int64_t>();
    if (json["type"] == "scalar" && json["name"] == "train/loss") found.losses.push_back(json["value"]);
  }
  return found;
}

/// The last "step 3/4" of progress lines.
std::string last_step(const std::string& lines) {
  const std::regex pattern("step (\\d+/\\d+)");
  std::string last;
  for (std::sregex_iterator found(lines.begin(), lines.end(), pattern), end; found != end; ++found) last = (*found)[1];
  return last;
}

struct Taken {
  double loss;
  int64_t samples;
};

/// Of each step, over the batches that this rank had in it.
std::vector<double> means(const std::vector<Taken>& batches, int64_t virtual_ranks) {
  std::vector<double> all;
  for (size_t at = 0; at < batches.size();) {
    double sum = 0, samples = 0;
    for (int64_t i = 0; i < virtual_ranks * kAccumulate; ++i, ++at) {
      sum += batches.at(at).loss * static_cast<double>(batches[at].samples);
      samples += static_cast<double>(batches[at].samples);
    }
    all.push_back(sum / samples);
  }
  return all;
}

TEST(CountedSteps, OfTheTrainerAreTheOptimizersWithAllSamples) {
  for (const int world : {1, 3, 4}) {
    const TemporaryFolder folder;
    const std::string run = (folder.path() / "run").string();
    run_ranks(world,
              [&](Context& context) {
                torch::nn::Sequential net(torch::nn::Linear(2, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
                torch::optim::SGD optimizer(net->parameters(), 0.05);
                DataLoader train(Points(kSamples), context,
                                 {.batch_size = kBatch, .accumulate = kAccumulate, .shuffle = true});
                ::testing::internal::CaptureStderr();
                std::vector<Taken> batches;
                {
                  Trainer trainer(net.ptr(), optimizer, context,
                                  {.epochs = kEpochs,
                                   .accumulate = kAccumulate,
                                   .run_log = RunLogOptions{.folder = run, .tensorboard = false}});
                  const TrainerResult result = trainer.fit(train, [&](Batch& batch) {
                    const at::Tensor loss = torch::mse_loss(net->forward(batch.data), batch.target);
                    batches.push_back({loss.item<double>(), batch.data.size(0)});
                    return loss;
                  });
                  EXPECT_EQ(result.steps, 2 * kEpochs);
                }
                const std::string shown = ::testing::internal::GetCapturedStderr();
                if (context.is_main()) {
                  EXPECT_EQ(last_step(shown), "2/2") << shown;
                }
                EXPECT_EQ(own_page().read(world).steps, 2 * kEpochs) << "as the launcher counts";
                const Recorded found = read_metrics(run + "/metrics_rank" + std::to_string(context.rank()) + ".jsonl");
                const auto block = context.virtual_block();
                const std::vector<double> expected = means(batches, block.last - block.first);
                ASSERT_EQ(found.losses.size(), expected.size());
                for (size_t step = 0; step < expected.size(); ++step)
                  EXPECT_NEAR(found.losses[step], expected[step], 1e-9);
              },
              std::chrono::seconds(100), {.seed = 5, .virtual_ranks = kVirtualRanks, .announce = false});
    int64_t samples = 0;
    for (int rank = 0; rank < world; ++rank)
      samples += read_metrics(run + "/metrics_rank" + std::to_string(rank) + ".jsonl").samples;
    EXPECT_EQ(samples, kSamples * kEpochs) << world << " ranks";
  }
}

TEST(CountedSteps, OfALoopOverALoaderAreThoseOfAllVirtualRanks) {
  run_ranks(3,
            [](Context& context) {
              torch::nn::Sequential net(torch::nn::Linear(2, 1));
              DistributedDataParallel model(net, context);
              DataLoader train(Points(kSamples), context, {.batch_size = kBatch});
              ::testing::internal::CaptureStderr();
              for (auto& batch : progress(train)) torch::mse_loss(model(batch.data), batch.target).backward();
              const std::string shown = ::testing::internal::GetCapturedStderr();
              EXPECT_EQ(own_page().read(3).steps, 4);
              if (context.is_main()) {
                EXPECT_EQ(last_step(shown), "4/4") << shown;
              }
            },
            std::chrono::seconds(60), {.virtual_ranks = kVirtualRanks, .announce = false});
}

/// Rank 0 works for one of three virtual ranks, rank 1 for two: what rank 0 does is a third.
TEST(CountedSteps, TheRunLogsRateIsThatOfAllSamples) {
  const TemporaryFolder folder;
  const std::string run = (folder.path() / "run").string();
  run_ranks(2,
            [&](Context& context) {
              RunLog log(context, {.folder = run});
              const auto block = context.virtual_block();
              for (int step = 0; step < 5; ++step) {
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                log.step(100 * (block.last - block.first));
              }
            },
            std::chrono::seconds(60), {.virtual_ranks = 3, .announce = false});
  double seconds = 0, own_samples = 0;
  std::ifstream lines(run + "/metrics_rank0.jsonl");
  for (std::string line; std::getline(lines, line);)
    if (const auto json = nlohmann::json::parse(line); json["type"] == "steps")
      seconds += json["seconds"].get<double>(), own_samples += json["samples"].get<double>();
  double rate = 0;
  for (const auto& entry : fs::directory_iterator(run + "/tensorboard")) {
    std::ifstream file(entry.path(), std::ios::binary);
    EventReader reader(file);
    while (const auto event = reader.next())
      for (const auto& value : event->values)
        if (value.tag == "rates/samples_per_second") rate = value.number;
  }
  EXPECT_TRUE(own_samples == 500 || own_samples == 1000);
  EXPECT_NEAR(rate * seconds, 1500, 15);
}

}  // namespace
}  // namespace lockstep::counted_steps_test
