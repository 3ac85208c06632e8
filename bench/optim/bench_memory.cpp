// How much memory a training of several ranks holds, for bench_memory.py, which runs it once for each system:
//
//     lockstep run -n 2 -- build/bin/bench_memory --system libtorch|sharded|shared --folder FOLDER [--layers 24]
//         [--width 2048] [--json FILE]
//
// libtorch: each rank steps its own copy by LibTorch's AdamW; sharded: the ranks share out the steps of ours; shared:
// and the parameters lie once in shared memory. After some steps, what all ranks hold together, as proportional set
// size: a page that k processes map counts 1/k in each. Then a checkpoint is saved and loaded, and a step made from
// what was loaded: the most memory of its own that a rank held besides what it had before.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr double kMiB = 1 << 20;
/// After some steps DistributedDataParallel gives memory back that no step has used.
constexpr int kSteps = 6;

struct Options {
  std::string system, folder, json;
  int64_t layers = 24, width = 2048;
  bool asynchronous = false;
};

/// The line of this name in a file of /proc/self, MiB.
double proc_mib(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  throw lockstep::Error(std::string(path) + " has no line " + name);
}
double proportional_mib() { return proc_mib("/proc/self/smaps_rollup", "Pss"); }
double private_mib() { return proc_mib("/proc/self/status", "RssAnon"); }

/// The most private memory while it lives, above what there was before, MiB.
class PeakPrivate {
 public:
  PeakPrivate() : before_(private_mib()), thread_([this] { watch(); }) {}
  ~PeakPrivate() { stop(); }
  double stop() {
    stopped_ = true;
    if (thread_.joinable()) thread_.join();
    return std::max(0.0, peak_ - before_);
  }

 private:
  void watch() {
    for (; !stopped_; std::this_thread::sleep_for(std::chrono::milliseconds(1))) peak_ = std::max(peak_, private_mib());
  }
  const double before_;
  double peak_ = 0;  ///< the thread's, until it is joined
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

struct Training {
  Training(const Options& options, const lockstep::Context& context, int64_t layers, int64_t width)
      : net(make_net(layers, width)), model(net, context), input(torch::ones({1, width})) {
    const AdamWOptions defaults(1e-4);
    using Ours = lockstep::ZeroRedundancyOptimizer<AdamW>;
    if (options.system == "libtorch")
      optimizer = std::make_unique<AdamW>(net->parameters(), defaults);
    else
      optimizer = std::make_unique<Ours>(
          model, defaults, lockstep::ZeroRedundancyOptions{.shared_parameters = options.system == "shared"});
  }
  static torch::nn::Sequential make_net(int64_t layers, int64_t width) {
    torch::nn::Sequential net;
    for (int64_t i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
    return net;
  }
  void step() {
    optimizer->zero_grad();
    model(input).square().mean().backward();
    optimizer->step();
  }
  double parameters_mib() const {
    double bytes = 0;
    for (const auto& parameter : net->parameters()) bytes += static_cast<double>(parameter.nbytes());
    return bytes / kMiB;
  }
  double state_mib() const {
    double bytes = 0;
    for (const auto& item : lockstep::state_dict(*optimizer)) bytes += static_cast<double>(item.value().nbytes());
    return bytes / kMiB;
  }

  torch::nn::Sequential net;
  lockstep::DistributedDataParallel<torch::nn::Sequential> model;
  torch::Tensor input;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

double over_ranks(const lockstep::Context& context, double value, lockstep::ReduceOp op) {
  const torch::Tensor sum = torch::tensor(value, torch::kDouble);
  context.group().all_reduce(sum, op);
  return sum.item<double>();
}

nlohmann::ordered_json measure(const Options& options, const lockstep::Context& context) {
  using enum lockstep::ReduceOp;
  Training(options, context, 2, 8).step();  // what is made once, such as threads and code
  context.group().barrier();
  const double before = over_ranks(context, proportional_mib(), kSum);
  Training training(options, context, options.layers, options.width);
  for (int step = 0; step < kSteps; ++step) training.step();
  context.group().barrier();
  const double held = over_ranks(context, proportional_mib(), kSum) - before;

  lockstep::Checkpointer checkpointer(options.folder, context.group(), {.asynchronous = options.asynchronous});
  checkpointer.add("model", training.model).add("optimizer", *training.optimizer);
  PeakPrivate saving;
  checkpointer.save(kSteps);
  checkpointer.finish();
  const double saved = over_ranks(context, saving.stop(), kMax);
  training.step();
  const std::string hash = lockstep::hash(lockstep::state_dict(*training.optimizer));
  PeakPrivate loading;
  if (!checkpointer.resume()) throw lockstep::Error("there is no checkpoint in " + options.folder);
  training.step();
  const double loaded = over_ranks(context, loading.stop(), kMax);

  if (lockstep::hash(lockstep::state_dict(*training.optimizer)) != hash)
    throw lockstep::Error("a step from the checkpoint is another one than that from memory");
  const double parameters = training.parameters_mib(), state = training.state_mib(), ranks = context.world_size();
  const bool copies = options.system != "shared", states = options.system == "libtorch";
  const double needed = parameters * (copies ? ranks : 1) + state * (states ? ranks : 1) + parameters * ranks;
  return {{"system", options.system},
          {"ranks", context.world_size()},
          {"parameters_mib", parameters},
          {"state_mib", state},
          {"gradients_mib", parameters},
          {"needed_mib", needed},
          {"held_mib", held},
          {"held_over_needed", held / needed},
          {"private_to_save_mib", saved},
          {"private_to_load_mib", loaded},
          {"state_hash", hash}};
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app{"The memory of a training by AdamW, of all ranks together."};
  app.add_option("--system", options.system)->required()->check(CLI::IsMember({"libtorch", "sharded", "shared"}));
  app.add_option("--folder", options.folder, "Of a checkpoint")->required();
  app.add_option("--layers", options.layers)->check(CLI::Range(1, 1000));
  app.add_option("--width", options.width, "Of each layer")->check(CLI::Range(1, 100000));
  app.add_flag("--asynchronous", options.asynchronous, "Write checkpoints from a copy, as by default");
  app.add_option("--json", options.json, "File for the figures");
  CLI11_PARSE(app, argc, argv);
  const lockstep::Context context(argc, argv, {.seed = 1});
  torch::set_num_threads(1);
  const nlohmann::ordered_json row = measure(options, context);
  if (context.is_main() && !options.json.empty()) std::ofstream(options.json) << row.dump(2) << "\n";
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_memory: %s\n", error.what());
  return 1;
}
