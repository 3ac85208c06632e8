// What metrics cost a step of the Fashion-MNIST example: mean loss, accuracy, top-5 and a confusion matrix, updated
// after every step, and reduced once an epoch of 938 steps.
//
//     build/bin/bench_metrics
//
// Steps and updates are timed apart, turn by turn, on one rank with the threads the context gives it; medians, of
// processor time too (all threads), which other programs on the machine disturb little: the share is of that. Inputs
// are random: no time depends on their values. What the metrics say is compared with PyTorch's operators first.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include <lockstep/context.h>
#include <lockstep/error.h>
#include <lockstep/metrics.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Time = std::chrono::steady_clock;

double microseconds_since(Time::time_point start) {
  return std::chrono::duration<double, std::micro>(Time::now() - start).count();
}

/// Of all threads.
double cpu_microseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// The example's network.
torch::nn::Sequential make_net() {
  using torch::nn::Conv2dOptions;
  return torch::nn::Sequential(
      torch::nn::Conv2d(Conv2dOptions(1, 16, 3).padding(1).bias(false)), torch::nn::BatchNorm2d(16), torch::nn::ReLU(),
      torch::nn::MaxPool2d(2), torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1).bias(false)),
      torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
      torch::nn::Linear(32 * 7 * 7, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
}

struct Set {
  lockstep::Metrics all;
  lockstep::Mean& loss = all.add("loss", lockstep::Mean());
  lockstep::Accuracy& accuracy = all.add("accuracy", lockstep::Accuracy());
  lockstep::Accuracy& top5 = all.add("top5", lockstep::Accuracy({.top_k = 5}));
  lockstep::ConfusionMatrix& matrix = all.add("kinds", lockstep::ConfusionMatrix(10));

  void update(const torch::Tensor& batch_loss, const torch::Tensor& scores, const torch::Tensor& target) {
    loss.update(batch_loss, target.size(0));
    accuracy.update(scores, target);
    top5.update(scores, target);
    matrix.update(scores, target);
  }
};

/// Trains for `steps` steps, and tells what the metrics took of them.
nlohmann::ordered_json measure(const lockstep::Context& context, int steps) {
  constexpr int64_t kBatch = 64, kStepsAnEpoch = 938;
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  Set metrics;
  std::vector<double> step_us, update_us, reduce_us, step_cpu_us, update_cpu_us;
  int64_t correct = 0, in_five = 0;
  for (int step = 0; step < steps; ++step) {
    const torch::Tensor data = torch::randn({kBatch, 1, 28, 28}), target = torch::randint(10, {kBatch}, torch::kLong);
    auto start = Time::now();
    double cpu = cpu_microseconds();
    optimizer.zero_grad();
    const torch::Tensor scores = net->forward(data);
    const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, target);
    loss.backward();
    optimizer.step();
    step_us.push_back(microseconds_since(start));
    step_cpu_us.push_back(cpu_microseconds() - cpu);
    start = Time::now();
    cpu = cpu_microseconds();
    metrics.update(loss, scores, target);
    update_cpu_us.push_back(cpu_microseconds() - cpu);
    update_us.push_back(microseconds_since(start));
    correct += scores.argmax(1).eq(target).sum().item<int64_t>();
    in_five += std::get<1>(scores.topk(5, 1)).eq(target.unsqueeze(1)).sum().item<int64_t>();
  }
  if (metrics.accuracy.correct() != correct || metrics.top5.correct() != in_five ||
      metrics.matrix.accuracy() != metrics.accuracy.value() || metrics.loss.count() != steps * kBatch)
    throw lockstep::Error("the metrics are wrong");
  for (int round = 0; round < std::max(3, steps / 10); ++round) {
    const auto start = Time::now();
    metrics.all.reduce(context.group());
    reduce_us.push_back(microseconds_since(start));
  }
  const double step = median(step_us), update = median(update_us), reduce = median(reduce_us);
  const double step_cpu = median(step_cpu_us), update_cpu = median(update_cpu_us);
  const double share = (update_cpu + reduce / kStepsAnEpoch) / step_cpu;
  std::printf(
      "a step of %ld images %.0f us, updating 4 metrics %.1f us, reducing them once an epoch %.0f us\n"
      "processor time: a step %.0f us, updating %.1f us: %.2f %%\n",
      kBatch, step, update, reduce, step_cpu, update_cpu, 100 * share);
  return {{"steps", steps},
          {"world_size", context.world_size()},
          {"step_us", step},
          {"update_us", update},
          {"reduce_us", reduce},
          {"step_cpu_us", step_cpu},
          {"update_cpu_us", update_cpu},
          {"share_of_a_step", share}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What metrics cost a step");
  int steps = 300;
  bool tiny = false;
  std::string json;
  app.add_option("--steps", steps, "Steps to time")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--json", json, "File for the figures");
  app.add_flag("--tiny", tiny, "3 steps, for tests");
  CLI11_PARSE(app, argc, argv);
  if (tiny) steps = 3;
  try {
    lockstep::Context context(argc, argv, {.seed = 1, .announce = false});
    const nlohmann::ordered_json figures = measure(context, steps);
    if (!json.empty() && context.is_main()) std::ofstream(json) << figures.dump(2) << '\n';
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_metrics: %s\n", error.what());
    return 1;
  }
}
