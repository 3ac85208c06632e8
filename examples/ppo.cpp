// Learns to balance a pole on a cart by proximal policy optimization (Schulman et al., 2017). Each rank has
// environments of its own, and all ranks learn one policy.
//
//     lockstep run -n 2 -- build/bin/ppo --iterations 30
//
// Every tenth iteration prints a line such as
//
//     iteration 30/30  steps per episode 199.9  KL 0.0040  epochs 10
//
// Points to copy:
//
// - Observations are normalized by RunningStatistics of all ranks, and advantages by standardize(), so that the ranks
//   learn as one process that has all environments would, up to rounding; --double makes that visible.
// - Whether to stop an iteration early is decided by group.mean() of the KL divergence, and so alike on every rank. A
//   rank that stopped alone would leave the others waiting in their backward.
// - A rank draws the random numbers of all environments and takes its own, so that they do not depend on the number of
//   ranks. The model is initialized before, from the same seed.

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
  int environments = 12, iterations = 30, steps = 128, epochs = 10;
  double lr = 3e-4, clip = 0.2, discount = 0.99, trace = 0.95, most_kl = 0.01;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

/// Carts with poles, many at once, as described by Barto, Sutton and Anderson (1983). An episode ends when the pole
/// falls or the cart leaves the track, and after 200 steps; another one begins.
class Carts {
 public:
  /// `first` to `first + count` of `all`.
  Carts(int all, int first, int count, uint64_t seed)
      : all_(all), first_(first), count_(count), random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    state_ = fresh();
    age_ = torch::zeros({count_}, torch::kLong);
  }
  /// [count, 4]: position, speed, angle and its speed.
  const torch::Tensor& state() const { return state_; }
  /// Numbers from 0 to 1 for each of these environments, [count].
  torch::Tensor draw() { return mine(torch::rand({all_}, random_, torch::kDouble)); }

  struct Result {
    torch::Tensor ended, steps;  ///< [count] bool; [count] the steps of those that ended
  };
  /// actions [count]: 1 pushes to the right, 0 to the left.
  Result step(const torch::Tensor& actions) {
    constexpr double kGravity = 9.8, kCart = 1, kPole = 0.1, kHalfLength = 0.5, kForce = 10, kTime = 0.02;
    const torch::Tensor force = actions.to(torch::kDouble) * 2 * kForce - kForce;
    const auto column = state_.unbind(1);
    const torch::Tensor sine = column[2].sin(), cosine = column[2].cos();
    const torch::Tensor pushed = (force + kPole * kHalfLength * column[3].square() * sine) / (kCart + kPole);
    const torch::Tensor turning =
        (kGravity * sine - cosine * pushed) / (kHalfLength * (4.0 / 3 - kPole * cosine.square() / (kCart + kPole)));
    const torch::Tensor moving = pushed - kPole * kHalfLength * turning * cosine / (kCart + kPole);
    state_ = state_ + kTime * torch::stack({column[1], moving, column[3], turning}, 1);
    age_ = age_ + 1;
    const auto now = state_.unbind(1);
    const torch::Tensor ended = (now[0].abs() > 2.4) | (now[2].abs() > 0.2095) | (age_ >= 200);
    const torch::Tensor steps = age_.masked_select(ended);
    state_ = torch::where(ended.unsqueeze(1), fresh(), state_);
    age_ = torch::where(ended, torch::zeros_like(age_), age_);
    return {ended, steps};
  }

 private:
  torch::Tensor mine(const torch::Tensor& of_all) const { return of_all.narrow(0, first_, count_); }
  torch::Tensor fresh() { return mine(torch::rand({all_, 4}, random_, torch::kDouble)) * 0.1 - 0.05; }

  const int all_, first_, count_;
  torch::Generator random_;
  torch::Tensor state_, age_;
};

struct ActorCriticImpl : nn::Module {
  /// observations [..., 4]; returns log probabilities [..., 2] and values [...].
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& observations) {
    return {policy->forward(observations).log_softmax(-1), value->forward(observations).squeeze(-1)};
  }
  static nn::Sequential network(int64_t outputs) {
    return nn::Sequential(nn::Linear(4, 64), nn::Tanh(), nn::Linear(64, 64), nn::Tanh(), nn::Linear(64, outputs));
  }
  nn::Sequential policy{register_module("policy", network(2))}, value{register_module("value", network(1))};
};
TORCH_MODULE(ActorCritic);

/// What the environments of a rank went through, [steps, count] each.
struct Experience {
  torch::Tensor observations, actions, log_probability, advantages, returns;
};

class Learning {
 public:
  Learning(const Options& options, lockstep::Context& context)
      : options_(options),
        group_(context.group()),
        is_main_(context.is_main()),
        count_(options.environments / context.world_size()),
        carts_(options.environments, context.rank() * count_, count_, options.seed),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        seen_(std::vector<int64_t>{4}) {
    net_->to(dtype_);
    model_.emplace(net_, context);
    optimizer_.emplace(net_->parameters(), torch::optim::AdamOptions(options.lr));
  }

  void run() {
    double length = 20;  // an average that forgets
    for (int i = 1; i <= options_.iterations; ++i) {
      const Experience experience = collect();
      const auto [kl, epochs] = learn(experience);
      const double ended = group_.mean(episodes_ended_), steps = group_.mean(steps_of_episodes_);
      if (ended > 0) length += 0.3 * (steps / ended - length);
      if (is_main_ && (i % 10 == 0 || i == options_.iterations))
        std::printf("iteration %d/%d  steps per episode %.1f  KL %.4f  epochs %d\n", i, options_.iterations, length, kl,
                    epochs);
      std::fflush(stdout);
      lengths_.push_back(length);
      epochs_.push_back(epochs);
    }
    report();
  }

 private:
  torch::Tensor normalized(const torch::Tensor& observations) { return seen_(observations).to(dtype_); }

  Experience collect() {
    const torch::NoGradGuard no_grad;
    episodes_ended_ = steps_of_episodes_ = 0;
    std::vector<torch::Tensor> observations, actions, log_probabilities, values, ended;
    for (int step = 0; step < options_.steps; ++step) {
      seen_->update(carts_.state(), group_);
      observations.push_back(normalized(carts_.state()));
      auto [log_probability, value] = net_(observations.back());
      actions.push_back((carts_.draw() < log_probability.select(1, 1).exp()).to(torch::kLong));
      log_probabilities.push_back(log_probability.gather(1, actions.back().unsqueeze(1)).squeeze(1));
      values.push_back(value);
      const Carts::Result result = carts_.step(actions.back());
      ended.push_back(result.ended);
      episodes_ended_ += static_cast<double>(result.steps.numel());
      steps_of_episodes_ += result.steps.sum().item<double>();
    }
    values.push_back(net_(normalized(carts_.state())).second);
    return with_advantages({torch::stack(observations), torch::stack(actions), torch::stack(log_probabilities), {}, {}},
                           values, ended);
  }

  /// Generalized advantages (Schulman et al., 2016); each step earns 1.
  Experience with_advantages(Experience experience, const std::vector<torch::Tensor>& values,
                             const std::vector<torch::Tensor>& ended) {
    std::vector<torch::Tensor> advantages(ended.size());
    torch::Tensor later = torch::zeros({count_}, dtype_);
    for (size_t step = ended.size(); step-- > 0;) {
      const torch::Tensor goes_on = ended[step].logical_not().to(dtype_);
      const torch::Tensor surprise = 1 + options_.discount * goes_on * values[step + 1] - values[step];
      later = surprise + options_.discount * options_.trace * goes_on * later;
      advantages[step] = later;
    }
    const torch::Tensor all = torch::stack(advantages);
    experience.returns = all + torch::stack(values).narrow(0, 0, options_.steps);
    experience.advantages = lockstep::standardize(all, group_);
    return experience;
  }

  /// Returns the last KL divergence from the policy that has acted, and the epochs until it was too large.
  std::pair<double, int> learn(const Experience& experience) {
    double kl = 0;
    for (int epoch = 1; epoch <= options_.epochs; ++epoch) {
      auto [log_probabilities, values] = (*model_)(experience.observations);
      const torch::Tensor log_probability = log_probabilities.gather(2, experience.actions.unsqueeze(2)).squeeze(2);
      const torch::Tensor ratio = (log_probability - experience.log_probability).exp();
      // Before the backward that it decides about, and of all ranks.
      kl = group_.mean((ratio - 1 - ratio.log()).mean().item<double>());
      if (kl > options_.most_kl) return {kl, epoch - 1};
      const torch::Tensor limited = ratio.clamp(1 - options_.clip, 1 + options_.clip);
      const torch::Tensor gain = torch::min(ratio * experience.advantages, limited * experience.advantages).mean();
      const torch::Tensor entropy = -(log_probabilities.exp() * log_probabilities).sum(2).mean();
      const torch::Tensor loss = 0.005 * (values - experience.returns).square().mean() - gain - 0.01 * entropy;
      optimizer_->zero_grad();
      loss.backward();
      model_->clip_grad_norm(0.5);
      optimizer_->step();
    }
    return {kl, options_.epochs};
  }

  void report() {
    if (!is_main_ || options_.json.empty()) return;
    const torch::Tensor weights = nn::utils::parameters_to_vector(net_->parameters()).to(torch::kDouble);
    const nlohmann::ordered_json figures{{"steps_per_episode", lengths_},
                                         {"epochs", epochs_},
                                         {"observations", seen_->count()},
                                         {"weights", {weights.norm().item<double>(), weights.sum().item<double>()}}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  const lockstep::Group group_;
  const bool is_main_;
  const int count_;  ///< environments of this rank
  Carts carts_;
  const torch::ScalarType dtype_;
  ActorCritic net_;
  lockstep::RunningStatistics seen_;
  std::optional<lockstep::DistributedDataParallel<ActorCritic>> model_;
  std::optional<torch::optim::Adam> optimizer_;
  double episodes_ended_ = 0, steps_of_episodes_ = 0;  ///< of this rank, in this iteration
  std::vector<double> lengths_;
  std::vector<int> epochs_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Learns to balance poles, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--environments", options.environments, "Of all ranks together, whose number must divide it")
      ->check(at_least_one);
  app.add_option("--iterations", options.iterations, "Rounds of acting and learning")->check(at_least_one);
  app.add_option("--steps", options.steps, "Steps of each environment in a round")->check(at_least_one);
  app.add_option("--lr", options.lr, "Learning rate")->check(CLI::PositiveNumber);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, environments and actions");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    if (options.environments % context.world_size() != 0)
      throw lockstep::Error("--environments " + std::to_string(options.environments) + " cannot be shared by " +
                            std::to_string(context.world_size()) + " ranks; choose a multiple of their number");
    Learning(options, context).run();
    return 0;
  });
}
