// Tells solids by points on their surfaces: clouds of 20 to 200 points, with a network to which neither their order nor
// their number matters (Qi et al., PointNet, 2017).
//
//     lockstep run -n 2 -- build/bin/point_cloud
//
// Every hundred steps print a line such as
//
//     step 300/300  loss 0.0646  unseen clouds told 0.99
//
// Points to copy:
//
// - A batch is not padded: the loader's function puts the points of all its clouds one after another, with the length
//   of each. The network works on points, and takes the maximum over those of each cloud.
// - Clouds, not points, are what is learned, so each rank's loss is the mean over its clouds, and ranks need no weights
//   although their numbers of points differ.
// - A cloud is drawn anew in each epoch, turned and with noise, from the sample's seed: so it does not depend on the
//   number of ranks.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 300, batch_size = 48;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kSolids = 4;

struct Cloud {
  torch::Tensor points;  ///< [n, 3]
  int64_t solid;
};

/// Spheres, cubes, cylinders and rings, turned about the upright axis and never quite round.
struct Clouds {
  int64_t count;

  int64_t size() const { return count; }
  Cloud get(int64_t index, uint64_t seed) const {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto draw = [&random](int64_t n) { return torch::rand({n}, random, torch::kDouble); };
    const int64_t n = 20 + static_cast<int64_t>(180 * draw(1).item<double>()), solid = index % kSolids;
    const torch::Tensor around = 2 * M_PI * draw(n), up = 2 * draw(n) - 1;
    torch::Tensor points;
    if (solid == 0) {
      const torch::Tensor wide = (1 - up.square()).sqrt();
      points = torch::stack({wide * around.cos(), wide * around.sin(), up}, 1);
    } else if (solid == 1) {
      points = torch::stack({up, 2 * draw(n) - 1, 2 * draw(n) - 1}, 1);
      const torch::Tensor side = (3 * draw(n)).floor().to(torch::kLong).unsqueeze(1);
      points.scatter_(1, side, (draw(n) > 0.5).to(torch::kDouble).unsqueeze(1) * 2 - 1);
    } else if (solid == 2) {
      points = torch::stack({around.cos(), around.sin(), up}, 1);
    } else {
      const torch::Tensor about = 2 * M_PI * draw(n), wide = 0.75 + 0.25 * about.cos();
      points = torch::stack({wide * around.cos(), wide * around.sin(), 0.25 * about.sin()}, 1);
    }
    const double turn = 2 * M_PI * draw(1).item<double>();
    const torch::Tensor turned =
        torch::tensor({{std::cos(turn), -std::sin(turn), 0.0}, {std::sin(turn), std::cos(turn), 0.0}, {0.0, 0.0, 1.0}},
                      torch::kDouble);
    const torch::Tensor scale = 0.7 + 0.6 * draw(3);
    return {(points * scale).matmul(turned) + 0.05 * torch::randn({n, 3}, random, torch::kDouble), solid};
  }
};

struct Batch {
  torch::Tensor points;   ///< of all clouds, [points, 3]
  torch::Tensor lengths;  ///< of each cloud, [clouds]
  torch::Tensor solids;   ///< [clouds]
};

Batch collate(const std::vector<Cloud>& clouds) {
  std::vector<torch::Tensor> points;
  std::vector<int64_t> lengths, solids;
  for (const Cloud& cloud : clouds) {
    points.push_back(cloud.points);
    lengths.push_back(cloud.points.size(0));
    solids.push_back(cloud.solid);
  }
  return {torch::cat(points), torch::tensor(lengths), torch::tensor(solids)};
}

struct PointNetImpl : nn::Module {
  /// Returns scores of the solids, [clouds, kSolids].
  torch::Tensor forward(const torch::Tensor& points, const torch::Tensor& lengths) {
    return judging->forward(torch::segment_reduce(looking->forward(points), "max", lengths));
  }
  nn::Sequential looking{register_module(
      "looking", nn::Sequential(nn::Linear(3, 64), nn::ReLU(), nn::Linear(64, 128), nn::ReLU(), nn::Linear(128, 128)))};
  nn::Sequential judging{
      register_module("judging", nn::Sequential(nn::ReLU(), nn::Linear(128, 64), nn::ReLU(), nn::Linear(64, kSolids)))};
};
TORCH_MODULE(PointNet);

class Training {
 public:
  Training(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        train_(Clouds{9600}, context,
               {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}, collate),
        unseen_(Clouds{200}, context, {.batch_size = 50, .exactly_once = true, .seed = options.seed + 1}, collate) {
    net_->to(dtype_);
    model_.emplace(net_, context);
    optimizer_.emplace(net_->parameters(), torch::optim::AdamOptions(1e-3));
  }

  void run() {
    lockstep::Metrics metrics;
    auto& loss = metrics.add("loss", lockstep::Mean());
    for (int step = 0; step < options_.steps;) {
      for (auto& batch : train_) {
        loss.update(learn(batch), batch.solids.size(0));
        if (!model_->step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        optimizer_->step();
        optimizer_->zero_grad();
        if (++step % 100 == 0 || step == options_.steps) {
          metrics.reduce(context_.group());
          losses_.push_back(loss.value());
          told_.push_back(judge());
          if (context_.is_main())
            std::printf("step %d/%d  loss %.4f  unseen clouds told %.2f\n", step, options_.steps, loss.value(),
                        told_.back());
          std::fflush(stdout);
        }
        if (step == options_.steps) break;
      }
    }
    report();
  }

 private:
  torch::Tensor learn(const Batch& batch) {
    const torch::Tensor scores = (*model_)(batch.points.to(dtype_), batch.lengths);
    const torch::Tensor loss = nn::functional::cross_entropy(scores, batch.solids);
    loss.backward();
    return loss.detach();
  }

  double judge() {
    const torch::NoGradGuard no_grad;
    torch::Tensor right = torch::zeros({}, torch::kLong);
    for (auto& batch : unseen_) right += (net_(batch.points.to(dtype_), batch.lengths).argmax(1) == batch.solids).sum();
    context_.group().all_reduce(right);
    return right.item<double>() / static_cast<double>(unseen_.dataset_size());
  }

  void report() {
    if (!context_.is_main() || options_.json.empty()) return;
    std::vector<double> norms;
    for (const torch::Tensor& parameter : net_->parameters()) norms.push_back(parameter.norm().item<double>());
    const nlohmann::ordered_json figures{{"losses", losses_},
                                         {"told", told_},
                                         {"weights", norms},
                                         {"hash", lockstep::hash(lockstep::state_dict(*net_))}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::ExampleLoader<Batch> train_, unseen_;
  PointNet net_;
  std::optional<lockstep::DistributedDataParallel<PointNet>> model_;
  std::optional<torch::optim::Adam> optimizer_;
  std::vector<double> losses_, told_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Learns to tell solids by points on their surfaces, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of training")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Clouds of a step, on all ranks together")->check(at_least_one);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, clouds and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Training(options, context).run();
    return 0;
  });
}
