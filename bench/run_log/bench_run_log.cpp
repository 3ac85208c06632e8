// What a RunLog costs a training: the network of the example on batches of its size, as many ranks as are started.
//
//     lockstep run -n 2 -- build/bin/bench_run_log --json run_log.json
//
// Three figures, because a step's own time varies more than what is measured: the time within the log's calls
// (formatting and writing included), the time of the 8 bytes by which ranks compare how long they waited, and, as a
// check, the ratio of steps with and without all of it, taking turns. The share is of processor time, the log's in a
// step's, which other programs on the machine disturb little. Before that, the lines that were written are counted.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Clock = std::chrono::steady_clock;
namespace nn = torch::nn;

struct Options {
  int rounds = 20;
  int steps = 20;
  int batch_size = 64;
  bool tiny = false;
  std::string json;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Of this thread, or of the process.
double cpu_seconds(clockid_t of) {
  timespec now{};
  ::clock_gettime(of, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

nn::Sequential make_net() {
  const auto convolution = [](int in, int out) { return nn::Conv2dOptions(in, out, 3).padding(1).bias(false); };
  return nn::Sequential(nn::Conv2d(convolution(1, 16)), nn::BatchNorm2d(16), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Conv2d(convolution(16, 32)), nn::BatchNorm2d(32), nn::ReLU(), nn::MaxPool2d(2),
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 128), nn::ReLU(), nn::Linear(128, 10));
}

class Bench {
 public:
  Bench(const Options& options, const lockstep::Context& context)
      : options_(options),
        context_(context),
        folder_(context.group().broadcast_bytes("/tmp/bench_run_log." + std::to_string(::getpid()))),
        images_(torch::randn({options.batch_size, 1, 28, 28})),
        labels_(torch::randint(0, 10, {options.batch_size})) {}
  ~Bench() {
    std::error_code ignored;
    if (context_.is_main()) std::filesystem::remove_all(folder_, ignored);
  }

  nlohmann::ordered_json run() {
    for (int step = 0; step < 10; ++step) train(nullptr);
    std::vector<double> without, with, ratios, cpu;
    for (int round = 0; round < options_.rounds; ++round) {
      model_.set_rank_comparison(false);
      const double before = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
      without.push_back(steps(nullptr));
      cpu.push_back((cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - before) / options_.steps);
      model_.set_rank_comparison(true);
      with.push_back(steps(&log_));
      ratios.push_back(with.back() / without.back());
    }
    log_.flush();
    const int64_t logged = int64_t{options_.rounds} * options_.steps;
    check_lines(logged);
    const double step_us = median(without) * 1e6, calls_us = in_calls_ / static_cast<double>(logged) * 1e6;
    const double step_cpu_us = median(cpu) * 1e6, calls_cpu_us = cpu_in_calls_ / static_cast<double>(logged) * 1e6;
    const auto [compare_us, compare_cpu_us] = compare_once();
    const auto bytes = static_cast<double>(bytes_written());
    context_.group().barrier();  // until here no rank takes the folder away
    return {{"ranks", context_.world_size()},
            {"steps", logged},
            {"step_us", step_us},
            {"calls_us", calls_us},
            {"compare_us", compare_us},
            {"step_cpu_us", step_cpu_us},
            {"calls_cpu_us", calls_cpu_us},
            {"compare_cpu_us", compare_cpu_us},
            {"share", (calls_cpu_us + compare_cpu_us) / step_cpu_us},
            {"median_ratio", median(ratios)},
            {"least_ratio", *std::min_element(ratios.begin(), ratios.end())},
            {"greatest_ratio", *std::max_element(ratios.begin(), ratios.end())},
            {"bytes_per_step", bytes / static_cast<double>(logged)}};
  }

 private:
  void train(lockstep::RunLog* log) {
    optimizer_.zero_grad();
    const torch::Tensor loss = nn::functional::cross_entropy(model_(images_), labels_);
    loss.backward();
    optimizer_.step();
    const double value = loss.item<double>();
    if (log == nullptr) return;
    const auto start = Clock::now();
    const double before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    log->step(options_.batch_size, {{"train/loss", value}, {"train/accuracy", 0.5}, {"learning_rate", 0.01}});
    cpu_in_calls_ += cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
    in_calls_ += seconds_since(start);
  }

  /// Seconds of one step.
  double steps(lockstep::RunLog* log) {
    context_.group().barrier();
    if (log != nullptr) log->epoch(0);
    const auto start = Clock::now();
    for (int step = 0; step < options_.steps; ++step) train(log);
    return seconds_since(start) / options_.steps;
  }

  /// What set_rank_comparison() does after each reduction: microseconds, and those of them on the processor.
  std::pair<double, double> compare_once() const {
    if (context_.world_size() == 1) return {0, 0};
    const torch::Tensor waited = torch::zeros({}, torch::kDouble);
    constexpr int kTimes = 500;
    (void)context_.group().all_gather(waited);
    const auto start = Clock::now();
    const double before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < kTimes; ++i) (void)context_.group().all_gather(waited);
    const double cpu = cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
    return {seconds_since(start) * 1e6 / kTimes, cpu * 1e6 / kTimes};
  }

  /// Every value that was logged must be in this rank's file.
  void check_lines(int64_t logged) const {
    std::ifstream file(folder_ + "/metrics_rank" + std::to_string(context_.rank()) + ".jsonl");
    int64_t scalars = 0;
    for (std::string line; std::getline(file, line);) scalars += nlohmann::json::parse(line)["type"] == "scalar";
    if (scalars != 3 * logged)
      throw lockstep::Error("the log holds " + std::to_string(scalars) + " values of " + std::to_string(3 * logged));
  }

  int64_t bytes_written() const {
    int64_t bytes = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_))
      if (entry.is_regular_file() && entry.path().filename().string().find("rank1") == std::string::npos)
        bytes += static_cast<int64_t>(entry.file_size());
    return bytes;
  }

  const Options options_;
  const lockstep::Context& context_;
  const std::string folder_;
  const torch::Tensor images_, labels_;
  nn::Sequential net_ = make_net();
  lockstep::DistributedDataParallel<nn::Sequential> model_{net_, context_};
  torch::optim::SGD optimizer_{net_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)};
  lockstep::RunLog log_ = make_log();
  double in_calls_ = 0, cpu_in_calls_ = 0;

  lockstep::RunLog make_log() {
    lockstep::RunLog log(context_, {.folder = folder_, .traced_reductions = 0});
    log.watch(model_);
    return log;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app{"What a RunLog costs a training step."};
  app.add_flag("--tiny", options.tiny, "A few steps, to see that it works");
  app.add_option("--rounds", options.rounds, "Rounds of steps with and without");
  app.add_option("--json", options.json, "File for the figures");
  CLI11_PARSE(app, argc, argv);
  if (options.tiny) options.rounds = 2, options.steps = 5;
  lockstep::Context context(argc, argv, {.seed = 1});
  const nlohmann::ordered_json figures = Bench(options, context).run();
  if (!context.is_main()) return 0;
  std::printf(
      "a step of the example's network takes %.0f us, the log's calls in it %.1f us, comparing ranks %.1f us\n"
      "processor time: a step %.0f us, the log's calls %.1f us, comparing ranks %.1f us: %.2f %%\n",
      figures["step_us"].get<double>(), figures["calls_us"].get<double>(), figures["compare_us"].get<double>(),
      figures["step_cpu_us"].get<double>(), figures["calls_cpu_us"].get<double>(),
      figures["compare_cpu_us"].get<double>(), 100 * figures["share"].get<double>());
  std::printf("steps with over without: %.3f (%.3f to %.3f in %d rounds); %.0f bytes a step\n",
              figures["median_ratio"].get<double>(), figures["least_ratio"].get<double>(),
              figures["greatest_ratio"].get<double>(), options.rounds, figures["bytes_per_step"].get<double>());
  if (!options.json.empty()) std::ofstream(options.json) << figures.dump(2) << "\n";
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_run_log: %s\n", error.what());
  return 1;
}
