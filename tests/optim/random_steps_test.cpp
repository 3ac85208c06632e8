#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>

#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/ranks.h"

// Random programs whose ranks share out the optimizer's steps. Each must leave the parameters and the state of the same
// program whose ranks step copies of their own, to the bit. A failure names the seed.

namespace lockstep::random_steps_test {
namespace {

using testing::run_ranks;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// ---- models ----

struct LayerImpl : torch::nn::Module {
  LayerImpl(int64_t width, bool transposed, at::ScalarType type)
      : up(register_module("up", torch::nn::Linear(5, width))),
        down(register_module("down", torch::nn::Linear(width, 5))),
        scale(register_parameter("scale", torch::ones({}))) {
    to(type);
    const at::NoGradGuard no_grad;
    if (transposed) up->weight.set_data(up->weight.t().contiguous().t());
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = down(torch::tanh(up(x.to(scale.scalar_type()))));
    return (y * scale).to(at::kDouble);
  }
  torch::nn::Linear up, down;
  at::Tensor scale;
};
TORCH_MODULE(Layer);

struct LayerPlan {
  int64_t width;
  bool transposed, frozen;
  at::ScalarType type;
};

/// Layers, of which each forward uses some, and one that nobody uses.
struct Net : torch::nn::Module {
  explicit Net(const std::vector<LayerPlan>& plans) {
    torch::manual_seed(plans.size());
    for (const LayerPlan& plan : plans) {
      layers.push_back(
          register_module(c10::str("layer", layers.size()), Layer(plan.width, plan.transposed, plan.type)));
      if (plan.frozen) layers.back()->down->bias.set_requires_grad(false);
    }
    register_module("never", torch::nn::Linear(3, 2));
  }
  at::Tensor loss(uint32_t seed, int rank) {
    std::mt19937 choose(seed + (seed % 3 == 0 ? static_cast<uint32_t>(rank) : 0));  // one in three differs by rank
    const auto draw = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(choose); };
    at::Tensor x = torch::sin(torch::arange(20, at::kDouble).reshape({4, 5}) * 0.37 + seed % 100 + rank);
    x = layers[0](x);
    for (size_t more = draw(layers.size() + 1); more > 0; --more) x = x + layers[draw(layers.size())](x);
    return x.square().mean();
  }
  std::vector<Layer> layers;
};

std::vector<at::Tensor> trained(const Net& net) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : net.parameters())
    if (parameter.requires_grad()) tensors.push_back(parameter);
  return tensors;
}

// ---- what a program does: its seed decides, so it is the same on every rank and for both sides ----

enum class Kind { kSgd, kAdam, kAdamW };

struct GroupPlan {
  double rate, decay, momentum, dampening;
  bool nesterov, amsgrad;
};

struct Round {
  int passes;
  bool accumulates, refreshes, resumes, reset_to_none;
  std::vector<uint32_t> seeds;
  std::vector<bool> skips;
  std::vector<double> weights;
  std::optional<int> spoiled_by;  ///< whose loss is infinite
  double clip, rate_factor;
};

struct Plan {
  Plan(int seed, int world_size);

  Kind kind;
  std::vector<LayerPlan> layers;
  std::vector<GroupPlan> groups;
  std::vector<size_t> group_of;  ///< for the i-th trained parameter
  DistributedDataParallelOptions model;
  ZeroRedundancyOptions optimizer;
  bool scales, compresses, checks;
  std::vector<Round> rounds;

 private:
  int draw(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }
  bool one_in(int n) { return draw(1, n) == 1; }
  template <typename T>
  T any(std::initializer_list<T> values) {
    return values.begin()[draw(0, static_cast<int>(values.size()) - 1)];
  }
  void draw_layers();
  void draw_groups();
  Round draw_round(int world_size);

  std::mt19937 random_;
};

Plan::Plan(int seed, int world_size) : random_(static_cast<uint32_t>(seed)) {
  kind = any({Kind::kSgd, Kind::kAdam, Kind::kAdamW});
  scales = one_in(4);
  compresses = one_in(6);
  checks = one_in(4);
  optimizer = {.shared_parameters = one_in(2), .master_weights = one_in(2)};
  model.first_bucket_cap_mb = one_in(2) ? 1 : 1e-4;
  model.bucket_cap_mb = one_in(2) ? 25 : 1e-3;
  model.reduction = any({GradientReduction::kMean, GradientReduction::kSum, GradientReduction::kWeightedMean});
  draw_layers();
  draw_groups();
  for (int count = draw(2, 6); count > 0; --count) rounds.push_back(draw_round(world_size));
}

void Plan::draw_layers() {
  const bool mixes = !scales && one_in(2);  // a GradScaler wants no parameters in half precision
  for (int count = draw(1, 5); count > 0; --count)
    layers.push_back({.width = any<int64_t>({1, 3, 17, 40, 200, 3000}),
                      .transposed = one_in(4),
                      .frozen = one_in(5),
                      .type = mixes && one_in(2) ? any({at::kDouble, at::kBFloat16, at::kBFloat16}) : at::kFloat});
}

void Plan::draw_groups() {
  for (int count = draw(1, 3); count > 0; --count) {
    const double momentum = one_in(2) ? 0.9 : 0;
    const bool nesterov = momentum > 0 && one_in(3);
    groups.push_back({.rate = any({1e-3, 0.01, 0.05}),
                      .decay = any({0.0, 0.01}),
                      .momentum = momentum,
                      .dampening = nesterov || one_in(2) ? 0 : 0.3,
                      .nesterov = nesterov,
                      .amsgrad = one_in(3)});
  }
  for (size_t i = 0; i < trained(Net(layers)).size(); ++i)
    group_of.push_back(static_cast<size_t>(draw(0, static_cast<int>(groups.size()) - 1)));
}

Round Plan::draw_round(int world_size) {
  Round round{.passes = draw(1, 3),
              .accumulates = one_in(2),
              .refreshes = one_in(6),
              .resumes = one_in(6),
              .reset_to_none = one_in(2),
              .seeds = {},
              .skips = std::vector<bool>(static_cast<size_t>(world_size)),
              .weights = {},
              .spoiled_by = {},
              .clip = any({0.0, 0.0, 0.1, 1.0}),
              .rate_factor = any({1.0, 1.0, 0.5})};
  for (int pass = 0; pass < round.passes; ++pass) round.seeds.push_back(static_cast<uint32_t>(draw(0, 1 << 30)));
  for (int rank = 0; rank < world_size; ++rank) round.weights.push_back(draw(rank == 0 ? 1 : 0, 50));
  if (one_in(6))
    for (size_t rank = 1; rank < round.skips.size(); ++rank) round.skips[rank] = one_in(2);
  if (one_in(6)) round.spoiled_by = draw(0, world_size - 1);
  return round;
}

// ---- one of the two programs ----

using Model = DistributedDataParallel<std::shared_ptr<Net>>;

class Program {
 public:
  Program(const Plan& plan, Context& context, bool shares_out)
      : plan_(plan),
        rank_(context.rank()),
        shares_out_(shares_out),
        net_(std::make_shared<Net>(plan.layers)),
        model_(net_, context, plan.model),
        scaler_(context.group(), {.init_scale = 1024, .enabled = plan.scales}) {
    if (plan.compresses) model_.register_comm_hook(bf16_compress_hook());
    if (plan.checks) model_.check_divergence_every(2);
    if (!plan.scales) model_.set_non_finite_policy(NonFinitePolicy::kSkip);
    make_optimizer();
  }

  void run(const Round& round) {
    if (round.resumes) resume();
    if (round.refreshes) model_.refresh();
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(group.options().get_lr() * round.rate_factor);
    // Clipping and weights leave no .grad to an optimizer that sums it. Zeros in its place would be stepped, by decay
    // and momentum, where a later backward does not reach the parameter.
    optimizer_->zero_grad(round.reset_to_none || leaves_none_);
    leaves_none_ = round.clip > 0 || plan_.model.reduction == GradientReduction::kWeightedMean;
    if (plan_.model.reduction == GradientReduction::kWeightedMean)
      model_.set_weight(round.weights[static_cast<size_t>(rank_)]);
    backward(round);
    if (round.clip > 0) {
      scaler_.unscale(*optimizer_);
      norms_.push_back(model_.clip_grad_norm(round.clip));
    }
    scaler_.step(*optimizer_);
    scaler_.update();
  }

  void expect_same(const Program& other) const {
    const auto theirs = other.net_->named_parameters();
    for (const auto& item : net_->named_parameters())
      EXPECT_TRUE(item.value().equal(theirs[item.key()])) << item.key() << "\n" << item.value() << theirs[item.key()];
    const StateDict state = state_dict(*optimizer_), expected = state_dict(*other.optimizer_);
    ASSERT_EQ(state.keys(), expected.keys());
    for (const auto& item : expected) EXPECT_TRUE(item.value().equal(state[item.key()])) << item.key();
    EXPECT_EQ(scaler_.get_scale(), other.scaler_.get_scale());
    EXPECT_EQ(model_.skipped_steps(), other.model_.skipped_steps());
    ASSERT_EQ(norms_.size(), other.norms_.size());
    for (size_t i = 0; i < norms_.size(); ++i)
      EXPECT_TRUE(norms_[i] == other.norms_[i] || (std::isnan(norms_[i]) && std::isnan(other.norms_[i])))
          << norms_[i] << " and " << other.norms_[i];
  }

  bool has_moved() const {
    const at::Tensor first = Net(plan_.layers).layers[0]->up->weight;
    return !net_->layers[0]->up->weight.equal(first);
  }

 private:
  void backward(const Round& round) {
    const bool skips = round.skips[static_cast<size_t>(rank_)];
    const auto pass = [&](size_t number) {
      const bool last = number + 1 == round.seeds.size();
      if (last && skips) return model_.skip_step();
      at::Tensor loss = net_->loss(round.seeds[number], rank_);
      if (last && round.spoiled_by == rank_) loss = loss * INFINITY;
      scaler_.scale(loss).backward();
    };
    if (round.accumulates) {
      const auto accumulation = model_.accumulate(round.passes);
      for (size_t i = 0; i < round.seeds.size(); ++i) pass(i);
      return;
    }
    if (const auto local = model_.no_sync(); true)
      for (size_t i = 0; i + 1 < round.seeds.size(); ++i) pass(i);
    pass(round.seeds.size() - 1);
  }

  void make_optimizer() {
    if (plan_.kind == Kind::kSgd)
      make<torch::optim::SGD>([](const GroupPlan& g) {
        return torch::optim::SGDOptions(g.rate)
            .momentum(g.momentum)
            .dampening(g.dampening)
            .nesterov(g.nesterov)
            .weight_decay(g.decay);
      });
    if (plan_.kind == Kind::kAdam)
      make<torch::optim::Adam>([](const GroupPlan& g) {
        return torch::optim::AdamOptions(g.rate).amsgrad(g.amsgrad).weight_decay(g.decay);
      });
    if (plan_.kind == Kind::kAdamW)
      make<torch::optim::AdamW>([](const GroupPlan& g) {
        return torch::optim::AdamWOptions(g.rate).amsgrad(g.amsgrad).weight_decay(g.decay);
      });
  }
  template <typename Kernel, typename OptionsOf>
  void make(const OptionsOf& options_of) {
    const std::vector<at::Tensor> parameters = trained(*net_);
    std::vector<OptimizerParamGroup> groups;
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      std::vector<at::Tensor> own;
      for (size_t i = 0; i < parameters.size(); ++i)
        if (plan_.group_of[i] == g) own.push_back(parameters[i]);
      const auto options = options_of(plan_.groups[g]);
      if (!own.empty()) groups.emplace_back(own, std::make_unique<std::decay_t<decltype(options)>>(options));
    }
    const auto defaults = options_of(plan_.groups[0]);
    const ZeroRedundancyOptions with{.shared_parameters = false, .master_weights = plan_.optimizer.master_weights};
    if (shares_out_)
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<Kernel>>(model_, groups, defaults, plan_.optimizer);
    else
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<Kernel>>(groups, defaults, with);
  }

  /// A new optimizer with the state of the old one. Rates, which a StateDict does not hold, begin anew on both sides.
  void resume() {
    StateDict state;
    for (const auto& item : state_dict(*optimizer_)) state.insert(item.key(), item.value().clone());
    optimizer_.reset();
    make_optimizer();
    load_state_dict(*optimizer_, state);
  }

  const Plan& plan_;
  const int rank_;
  const bool shares_out_;
  const std::shared_ptr<Net> net_;
  Model model_;
  std::unique_ptr<Optimizer> optimizer_;
  GradScaler scaler_;
  bool leaves_none_ = false;  ///< the round before leaves no .grad on one of the two sides
  std::vector<double> norms_;
};

/// Returns whether the program has changed the parameters.
bool compare(int seed, Context& context) {
  Plan plan(seed, context.world_size());
  if (context.group().backend() == "gloo") plan.optimizer.shared_parameters = false;
  Program mine(plan, context, /*shares_out=*/true), theirs(plan, context, /*shares_out=*/false);
  for (const Round& round : plan.rounds) {
    mine.run(round);
    theirs.run(round);
    mine.expect_same(theirs);
    if (::testing::Test::HasFailure()) return false;
    context.group().barrier();  // with shared parameters, no rank goes on while another compares
  }
  return mine.has_moved();
}

class RandomSteps : public ::testing::TestWithParam<testing::Engine> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RandomSteps,
                         ::testing::Values(testing::Engine{2, "shm"}, testing::Engine{3, "shm"},
                                           testing::Engine{2, "gloo"}, testing::Engine{3, "gloo"},
                                           testing::Engine{4, "hierarchical", "aaab"}),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(RandomSteps, HaveTheBitsOfEachRankAlone) {
  const testing::Engine engine = GetParam();
  const int usual = engine.backend == "shm" ? 100 : 20;
  const int first = engine.world_size * 100'000, count = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 1000 : usual;
  run_ranks(
      engine.world_size,
      [&](Context& context) {
        int moved = 0;
        for (int seed = first; seed < first + count; ++seed) {
          SCOPED_TRACE("seed " + std::to_string(seed));
          try {
            moved += compare(seed, context);
          } catch (const std::exception& error) {
            ADD_FAILURE() << error.what();
          }
          if (::testing::Test::HasFailure()) return;  // the ranks may no longer run the same steps
        }
        EXPECT_GT(moved, count * 9 / 10);
      },
      std::chrono::seconds(250), {.backend = engine.backend, .announce = false}, engine.machines);
}

}  // namespace
}  // namespace lockstep::random_steps_test
