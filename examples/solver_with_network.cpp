// A solver with a network inside: the viscous Burgers equation on a coarse grid, whose time step adds a correction of
// the fluxes that a network computes. The network is trained through the solver, by what comes out after many steps,
// towards a run on a grid eight times as fine.
//
//     lockstep run -n 2 -- build/bin/solver_with_network
//
// Every fiftieth step prints a line such as
//
//     step 100/200  loss 0.000167  error after 64 time steps 0.0149, of the solver alone 0.0339
//
// Points to copy:
//
// - Each rank solves for initial states of its own, and there is one backward through all their time steps: the replica
//   sees that the network was called many times, and sends each gradient once.
// - With --checkpoint-time-steps each time step is a checkpoint(): it keeps its state alone, and the network's
//   activations are computed again in backward. So the memory of a long run is that of its states.
// - Initial states are drawn from the samples' seeds, and the fine run is a part of the loader's work, so it goes on
//   beside the training.

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
  int steps = 200, batch_size = 24, time_steps = 16;
  bool checkpoint_time_steps = false, use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kCells = 32, kFiner = 8;
constexpr double kViscosity = 0.003, kTimeStep = 0.01;

/// Fluxes through the right walls of periodic cells, of states u [n, cells]: Rusanov's, and viscosity's.
torch::Tensor fluxes(const torch::Tensor& u) {
  const auto cells = static_cast<double>(u.size(1));
  const torch::Tensor right = u.roll(-1, 1);
  const torch::Tensor fastest = torch::max(u.abs(), right.abs());
  return 0.25 * (u.square() + right.square()) - 0.5 * fastest * (right - u) - kViscosity * cells * (right - u);
}
/// The state after a time step, given the fluxes.
torch::Tensor moved(const torch::Tensor& u, const torch::Tensor& flux, double time_step) {
  return u - time_step * static_cast<double>(u.size(1)) * (flux - flux.roll(1, 1));
}

/// The fine run's states at the coarse time steps, averaged over coarse cells: [n, time_steps + 1, kCells].
torch::Tensor fine_run(torch::Tensor u, int time_steps) {
  std::vector<torch::Tensor> states;
  const auto coarse = [&u] { return u.view({u.size(0), kCells, kFiner}).mean(2); };
  states.push_back(coarse());
  for (int i = 0; i < time_steps; ++i) {
    for (int64_t part = 0; part < kFiner; ++part) u = moved(u, fluxes(u), kTimeStep / kFiner);
    states.push_back(coarse());
  }
  return torch::stack(states, 1);
}

/// Fine runs from sums of waves, drawn anew in each epoch.
lockstep::datasets::FromFunction runs(int64_t size, int time_steps) {
  return {size, [time_steps](at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t> seeds) {
            const torch::Tensor x = torch::arange(kCells * kFiner, torch::kDouble) * (2 * M_PI / (kCells * kFiner));
            std::vector<torch::Tensor> states;
            for (size_t i = 0; i < indices.size(); ++i) {
              lockstep::transforms::Random random(seeds[i]);
              torch::Tensor u = torch::zeros_like(x);
              for (int wave = 1; wave <= 4; ++wave)
                u += (random.uniform() - 0.5) * (wave * x + 2 * M_PI * random.uniform()).sin();
              states.push_back(u);
            }
            return lockstep::Batch{fine_run(torch::stack(states), time_steps)};
          }};
}

struct CorrectionImpl : nn::Module {
  CorrectionImpl() {
    const torch::NoGradGuard no_grad;
    last->weight.zero_();  // the solver alone, at first
  }
  /// What is to be added to the fluxes of states u [n, cells].
  torch::Tensor forward(const torch::Tensor& u) {
    return last(torch::gelu(second(torch::gelu(first(u.unsqueeze(1)))))).squeeze(1);
  }
  static nn::Conv1d layer(int64_t from, int64_t to, bool bias) {
    return nn::Conv1d(nn::Conv1dOptions(from, to, 5).padding(2).padding_mode(torch::kCircular).bias(bias));
  }
  nn::Conv1d first{register_module("first", layer(1, 32, true))},
      second{register_module("second", layer(32, 32, true))};
  nn::Conv1d last{register_module("last", layer(32, 1, false))};  // what all fluxes have in common changes nothing
};
TORCH_MODULE(Correction);

class Training {
 public:
  Training(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        train_(runs(2400, options.time_steps), context,
               {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}),
        unseen_(runs(48, 4 * options.time_steps), context,
                {.batch_size = 8, .exactly_once = true, .seed = options.seed + 1}) {
    net_->to(dtype_);
    model_.emplace(net_, context);
    optimizer_.emplace(net_->parameters(), torch::optim::AdamOptions(3e-3));
  }

  void run() {
    lockstep::Metrics metrics;
    auto& loss = metrics.add("loss", lockstep::Mean());
    const double alone = error(/*corrected=*/false);
    for (int step = 0; step < options_.steps;) {
      for (auto& [states, unused] : train_) {
        loss.update(learn(states.to(dtype_)), states.size(0));
        if (!model_->step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        optimizer_->step();
        optimizer_->zero_grad();
        if (++step % 50 == 0 || step == options_.steps) {
          metrics.reduce(context_.group());
          losses_.push_back(loss.value());
          errors_.push_back(error(/*corrected=*/true));
          if (context_.is_main())
            std::printf("step %d/%d  loss %.6f  error after %d time steps %.4f, of the solver alone %.4f\n", step,
                        options_.steps, loss.value(), 4 * options_.time_steps, errors_.back(), alone);
          std::fflush(stdout);
        }
        if (step == options_.steps) break;
      }
    }
    report();
  }

 private:
  /// states [n, time steps + 1, kCells] of the fine run.
  torch::Tensor learn(const torch::Tensor& states) {
    const auto time_step = [this](const torch::Tensor& state) {
      return moved(state, fluxes(state) + (*model_)(state), kTimeStep);
    };
    torch::Tensor u = states.select(1, 0), loss = torch::zeros({}, dtype_);
    for (int64_t i = 1; i < states.size(1); ++i) {
      u = options_.checkpoint_time_steps ? lockstep::checkpoint(time_step, u) : time_step(u);
      loss = loss + (u - states.select(1, i)).square().mean();
    }
    loss = loss / static_cast<double>(states.size(1) - 1);
    loss.backward();
    return loss.detach();
  }

  /// The root of the mean squared error at the end of unseen runs.
  double error(bool corrected) {
    const torch::NoGradGuard no_grad;
    double sum = 0;
    for (auto& [states, unused] : unseen_) {
      const torch::Tensor expected = states.to(dtype_);
      torch::Tensor u = expected.select(1, 0);
      for (int64_t i = 1; i < expected.size(1); ++i)
        u = moved(u, corrected ? fluxes(u) + net_(u) : fluxes(u), kTimeStep);
      sum += (u - expected.select(1, -1)).square().mean(1).sum().item<double>();
    }
    return std::sqrt(context_.group().mean(sum) * context_.world_size() / static_cast<double>(unseen_.dataset_size()));
  }

  void report() {
    if (!context_.is_main() || options_.json.empty()) return;
    std::vector<double> norms;
    for (const torch::Tensor& parameter : net_->parameters()) norms.push_back(parameter.norm().item<double>());
    const nlohmann::ordered_json figures{{"losses", losses_},
                                         {"errors", errors_},
                                         {"weights", norms},
                                         {"hash", lockstep::hash(lockstep::state_dict(*net_))}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::DataLoader train_, unseen_;
  Correction net_;
  std::optional<lockstep::DistributedDataParallel<Correction>> model_;
  std::optional<torch::optim::Adam> optimizer_;
  std::vector<double> losses_, errors_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a network inside a solver of a differential equation, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of training")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Runs of a step, on all ranks together")->check(at_least_one);
  app.add_option("--time-steps", options.time_steps, "Time steps of the solver in a run")->check(at_least_one);
  app.add_flag("--checkpoint-time-steps", options.checkpoint_time_steps,
               "Compute the network's activations again in backward, for less memory");
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, initial states and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Training(options, context).run();
    return 0;
  });
}
