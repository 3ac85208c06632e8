// Fits coloured spots to a picture, whose number changes while they are trained: spots that are pulled about are split,
// those that nobody sees are removed. What Adam keeps for a spot follows it.
//
//     lockstep run -n 2 -- build/bin/grow_and_prune
//
// Every hundred steps print a line such as
//
//     step 200/600  error 0.0060  spots 73 + 11 - 1
//
// Points to copy:
//
// - The parameters are bare tensors, so the model is a list of them. A change of rows makes new tensors, and refresh()
//   attaches to these.
// - Every rank takes the same decision, because it decides by numbers of all ranks: by gradients, which after a
//   backward are the mean over all pixels, and by counts of what this rank has seen, which it sums. Counts are
//   integers, so their sum does not depend on the number of ranks.
// - The offsets of split spots come from a generator with the same seed on every rank.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

struct Options {
  int steps = 600, batch_size = 1536, every = 100;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kSide = 96;

/// The colours [n, 3] of a picture at `places` [n, 2] from 0 to 1: a sky, a sun, and a striped hill.
torch::Tensor picture(const torch::Tensor& places) {
  const torch::Tensor x = places.select(1, 0), y = places.select(1, 1);
  const torch::Tensor sun = torch::sigmoid(80 * (0.15 - ((x - 0.7).square() + (y - 0.25).square()).sqrt()));
  const torch::Tensor hill = torch::sigmoid(60 * (y - 0.6 - 0.1 * (5 * x).sin()));
  const torch::Tensor stripes = 0.5 + 0.3 * (40 * (x + y)).sin();
  const torch::Tensor sky = torch::stack({0.2 + 0.3 * y, 0.4 + 0.3 * y, 0.9 - 0.2 * y}, 1);
  const torch::Tensor lit = sky + sun.unsqueeze(1) * (torch::tensor({1.0, 0.9, 0.3}, places.options()) - sky);
  const torch::Tensor grass = torch::stack({0.2 * stripes, 0.8 * stripes, 0.3 * stripes}, 1);
  return lit + hill.unsqueeze(1) * (grass - lit);
}

/// Round spots whose colours add up.
struct Spots {
  torch::Tensor centre, log_size, colour;  ///< [n, 2], [n], [n, 3]

  std::vector<torch::Tensor*> tensors() { return {&centre, &log_size, &colour}; }
  lockstep::NamedTensors named() const { return {{"centre", centre}, {"log_size", log_size}, {"colour", colour}}; }
  int64_t count() const { return centre.size(0); }
  /// How strongly each spot is seen at each place, [places, n].
  torch::Tensor weights(const torch::Tensor& places) const {
    const torch::Tensor away = (places.unsqueeze(1) - centre).square().sum(2);
    return (-0.5 * away * (-2 * log_size).exp()).exp();
  }
};

class Fitting {
 public:
  Fitting(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        pixels_(lockstep::datasets::FromFunction(kSide * kSide, pixels), context,
                {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}),
        random_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {
    constexpr int64_t kAtFirst = 64;
    spots_.centre = torch::rand({kAtFirst, 2}, random_, torch::kDouble);
    spots_.log_size = torch::full({kAtFirst}, std::log(0.07), torch::kDouble);
    spots_.colour = torch::full({kAtFirst, 3}, 0.2, torch::kDouble);
    for (torch::Tensor* tensor : spots_.tensors()) *tensor = tensor->to(dtype_).requires_grad_();
    model_.emplace(spots_.named(), context);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    const std::vector<std::pair<torch::Tensor, double>> rates{
        {spots_.centre, 2e-3}, {spots_.log_size, 1e-2}, {spots_.colour, 1e-2}};
    for (const auto& [tensor, rate] : rates)
      groups.emplace_back(std::vector{tensor}, std::make_unique<torch::optim::AdamOptions>(rate));
    optimizer_.emplace(groups, torch::optim::AdamOptions());
    forget();
  }

  void run() {
    lockstep::Metrics metrics;
    auto& error = metrics.add("error", lockstep::Mean());
    for (int step = 0; step < options_.steps;) {
      for (auto& [places, colours] : pixels_) {
        error.update(learn(places.to(dtype_), colours.to(dtype_)), places.size(0));
        if (!model_->step_complete()) continue;  // with virtual ranks: others of this rank are still to come
        pull_ += spots_.centre.grad().norm(2, 1);
        optimizer_->step();
        optimizer_->zero_grad();
        if (++step % options_.every == 0) {
          metrics.reduce(context_.group());
          errors_.push_back(error.value());
          grow_and_prune(step);
        }
        if (step == options_.steps) break;
      }
    }
    report();
  }

 private:
  static lockstep::Batch pixels(at::ArrayRef<int64_t> indices) {
    const torch::Tensor chosen = torch::tensor(indices);
    const torch::Tensor places =
        torch::stack({chosen % kSide, chosen.floor_divide(kSide)}, 1).to(torch::kDouble) / kSide;
    return {places, picture(places)};
  }

  torch::Tensor learn(const torch::Tensor& places, const torch::Tensor& colours) {
    const torch::Tensor weights = spots_.weights(places);
    {
      const torch::NoGradGuard no_grad;
      seen_ += (weights * spots_.colour.abs().amax(1) > 0.06).sum(0);
    }
    const torch::Tensor loss = (weights.matmul(spots_.colour) - colours).square().mean();
    loss.backward();
    return loss.detach();
  }

  void grow_and_prune(int step) {
    context_.group().all_reduce(seen_);
    const torch::Tensor split = (pull_ > 1.5 * pull_.mean()) & (seen_ > 0);
    const torch::Tensor kept = ((seen_ > 0) & split.logical_not()).nonzero().squeeze(1);
    const torch::Tensor parents = split.nonzero().squeeze(1), twins = torch::cat({parents, parents});
    const int64_t before = spots_.count(), pruned = (seen_ == 0).sum().item<int64_t>();
    take(torch::cat({kept, twins}), kept.size(0));
    const torch::NoGradGuard no_grad;
    torch::Tensor log_size = spots_.log_size.narrow(0, kept.size(0), twins.size(0));
    const torch::Tensor offsets = torch::randn({twins.size(0), 2}, random_, torch::kDouble).to(dtype_);
    spots_.centre.narrow(0, kept.size(0), twins.size(0)) += 0.5 * log_size.exp().unsqueeze(1) * offsets;
    log_size -= std::log(1.6);
    spots_.colour.narrow(0, kept.size(0), twins.size(0)) *= 0.6;
    model_->refresh(spots_.named());
    forget();
    counts_.push_back(spots_.count());
    if (context_.is_main())
      std::printf("step %d/%d  error %.4f  spots %ld + %ld - %ld\n", step, options_.steps, errors_.back(), before,
                  parents.size(0), pruned);
    std::fflush(stdout);
  }

  /// Each parameter becomes its rows at `rows`, and so does what Adam keeps for it; rows from `kept` on start anew.
  void take(const torch::Tensor& rows, int64_t kept) {
    const auto all = spots_.tensors();
    for (size_t i = 0; i < all.size(); ++i) {
      const torch::Tensor old = *all[i];
      *all[i] = old.detach().index_select(0, rows).requires_grad_();
      optimizer_->param_groups()[i].params()[0] = *all[i];
      auto state = std::move(optimizer_->state().at(old.unsafeGetTensorImpl()));
      optimizer_->state().erase(old.unsafeGetTensorImpl());
      auto& adam = static_cast<torch::optim::AdamParamState&>(*state);
      for (const torch::Tensor& moment : {adam.exp_avg(), adam.exp_avg_sq()}) {
        const torch::Tensor taken = moment.index_select(0, rows);
        taken.narrow(0, kept, rows.size(0) - kept).zero_();
        moment.set_data(taken);
      }
      optimizer_->state()[all[i]->unsafeGetTensorImpl()] = std::move(state);
    }
  }

  void forget() {
    seen_ = torch::zeros({spots_.count()}, torch::kLong);
    pull_ = torch::zeros({spots_.count()}, dtype_);
  }

  void report() {
    if (!context_.is_main() || options_.json.empty()) return;
    std::vector<double> norms;
    lockstep::StateDict state;
    for (const auto& [name, tensor] : spots_.named()) {
      norms.push_back(tensor.norm().item<double>());
      state.insert(name, tensor.detach());
    }
    const nlohmann::ordered_json figures{
        {"losses", errors_}, {"counts", counts_}, {"weights", norms}, {"hash", lockstep::hash(state)}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::DataLoader pixels_;
  torch::Generator random_;
  Spots spots_;
  std::optional<lockstep::DistributedDataParallel<lockstep::NamedTensors>> model_;
  std::optional<torch::optim::Adam> optimizer_;
  torch::Tensor seen_, pull_;  ///< [n]: pixels on this rank that see a spot; sum of the gradients' norms of its centre
  std::vector<double> errors_;
  std::vector<int64_t> counts_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Fits a growing number of spots to a picture, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of training")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Pixels of a step, on all ranks together")->check(at_least_one);
  app.add_option("--every", options.every, "Steps between changes of the number of spots")->check(at_least_one);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of spots and batches");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Fitting(options, context).run();
    return 0;
  });
}
