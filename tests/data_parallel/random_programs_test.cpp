#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>

#include "data_parallel/models.h"
#include "data_parallel/recompute.h"
#include "support/ranks.h"
#include "support/tree_sum.h"

// Random programs that use DistributedDataParallel correctly: none may throw, and each must leave the gradients,
// buffers and weights that one process computes by running every rank's share itself. A failure names the seed.

namespace lockstep::random_programs_test {
namespace {

using namespace testing;  // NOLINT

/// A layer of the random models, on 5 features: linear, then perhaps a batch norm (with or without parameters).
struct BlockImpl : torch::nn::Module {
  enum class Norm { kNone, kAffine, kBuffersAlone };

  BlockImpl(Norm norm, at::ScalarType dtype, int key) {
    register_module("linear", linear);
    if (norm != Norm::kNone)
      bn =
          register_module("bn", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(5).affine(norm == Norm::kAffine)));
    at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(formula(parameter.sizes(), ++key));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = linear(x.to(linear->weight.scalar_type()));
    if (bn) y = bn(y);
    return torch::tanh(y).to(at::kDouble);
  }
  torch::nn::Linear linear{5, 5};
  torch::nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(Block);

/// Blocks; the first one also under a second name, and a layer that no rank uses.
struct Blocks : torch::nn::Module {
  void add(BlockImpl::Norm norm, at::ScalarType dtype) {
    const int number = next_++;
    blocks.push_back(register_module(c10::str("b", number), Block(norm, dtype, 10 * number)));
    if (number > 0) return;
    register_module("again", blocks[0]);
    register_module("never", torch::nn::Linear(2, 2));
  }
  void remove(size_t index) {
    unregister_module(name_of(blocks[index]));
    blocks.erase(blocks.begin() + static_cast<long>(index));
  }
  std::string name_of(const Block& block) const {
    for (const auto& child : named_children())
      if (child.value() == block.ptr()) return child.key();
    return "";
  }
  std::vector<Block> blocks;

 private:
  int next_ = 0;
};

/// Each parameter once, in the order that both models have.
NamedTensors parameters_of(const torch::nn::Module& module) {
  NamedTensors parameters;
  for (const auto& item : module.named_parameters())
    if (!item.key().starts_with("again.")) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

using Tensors = std::map<std::string, at::Tensor>;

Tensors buffers_of(const torch::nn::Module& module) {
  Tensors buffers;
  for (const auto& item : module.named_buffers())
    if (!item.key().starts_with("again.")) buffers[item.key()] = item.value().clone();
  return buffers;
}

/// What a program does. Only its seed decides, so it is the same on every rank. `model` is trained by all ranks,
/// `reference` by this process alone.
class Program {
 public:
  Program(int seed, const Context& context)
      : context_(context), world_size_(context.world_size()), random_(static_cast<uint32_t>(seed)) {
    recomputes_ = one_in(4);
    mixes_dtypes_ = one_in(2);
    options_.first_bucket_cap_mb = draw(0, 1) ? 1 : 1e-4;
    options_.bucket_cap_mb = draw(0, 1) ? 25 : 3e-4;
    options_.reduction = std::array{GradientReduction::kMean, GradientReduction::kSum,
                                    GradientReduction::kWeightedMean}[static_cast<size_t>(draw(0, 2))];
    options_.buffers = std::array{BufferPolicy::kFollowRankZero, BufferPolicy::kMean,
                                  BufferPolicy::kNone}[static_cast<size_t>(draw(0, 2))];
    for (int count = draw(1, 5); count > 0; --count) add_block();
    buffers_.assign(static_cast<size_t>(world_size_), buffers_of(*reference_));
  }

  void run() {
    spoil(parameters_of(*model_));
    freeze();
    replica_.emplace(model_, context_, options_);
    equip();
    for (int step = draw(2, 5); step > 0 && !failed(); --step) {
      if (one_in(3)) edit();
      if (one_in(5))
        join();
      else
        take_step();
    }
    replica_->check_divergence();
    EXPECT_EQ(replica_->skipped_steps(), 0);
  }

 private:
  /// What each rank's share of a step is.
  struct Plan {
    std::vector<double> weights;
    std::vector<bool> active;
  };

  int draw(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }
  bool one_in(int n) { return draw(1, n) == 1; }
  static bool failed() { return ::testing::Test::HasFailure(); }
  static size_t index(int rank) { return static_cast<size_t>(rank); }

  // --- what programs do between steps ---

  void add_block() {
    const auto norm = std::array{BlockImpl::Norm::kNone, BlockImpl::Norm::kNone, BlockImpl::Norm::kAffine,
                                 BlockImpl::Norm::kBuffersAlone}[static_cast<size_t>(draw(0, 3))];
    const auto dtype = mixes_dtypes_ && one_in(2) ? (one_in(3) ? at::kBFloat16 : at::kFloat) : at::kDouble;
    // Every rank reaches the first block, which stays in double. A block in half precision gets no batch norm.
    const bool first = model_->blocks.empty();
    for (auto* blocks : {model_.get(), reference_.get()})
      blocks->add(dtype == at::kBFloat16 ? BlockImpl::Norm::kNone : norm, first ? at::kDouble : dtype);
    exact_ = exact_ && (first || dtype == at::kDouble);
  }

  /// On the other ranks, values that rank 0's must replace.
  void spoil(const NamedTensors& tensors) const {
    at::NoGradGuard no_grad;
    for (auto& [name, tensor] : tensors) at::Tensor(tensor).add_(context_.rank());
  }

  /// Any parameter except the first block's weight.
  void freeze() {
    const auto parameters = parameters_of(*model_), others = parameters_of(*reference_);
    for (size_t i = 1; i < parameters.size(); ++i) {
      const bool trained = !one_in(5);
      for (at::Tensor parameter : {parameters[i].second, others[i].second}) parameter.set_requires_grad(trained);
    }
  }

  void equip() {
    const int hook = draw(0, 7);
    if (hook == 0) replica_->register_comm_hook(all_reduce_hook());
    if (hook == 1) replica_->register_comm_hook(fp16_compress_hook());
    if (hook == 2) replica_->register_comm_hook(bf16_compress_hook());
    lossy_ = hook == 1 ? 4e-3 : hook == 2 ? 4e-2 : 0;
    exact_ = exact_ && lossy_ == 0;
    replica_->check_divergence_every(draw(0, 3));
    replica_->set_rank_comparison(one_in(3));
    replica_->set_non_finite_policy(std::array{NonFinitePolicy::kIgnore, NonFinitePolicy::kSkip,
                                               NonFinitePolicy::kRaise}[static_cast<size_t>(draw(0, 2))]);
  }

  void edit() {
    const int what = draw(0, 2);
    if (what == 0) freeze();
    if (what == 1) {
      const auto before = parameters_of(*model_).size();
      add_block();
      const std::string newest = model_->name_of(model_->blocks.back()) + ".";
      NamedTensors fresh = parameters_of(*model_);
      std::erase_if(fresh, [&](const auto& named) { return !named.first.starts_with(newest); });
      EXPECT_EQ(before + fresh.size(), parameters_of(*model_).size());
      spoil(fresh);
      for (Tensors& buffers : buffers_)
        for (const auto& [name, buffer] : buffers_of(*reference_)) buffers.try_emplace(name, buffer);
    }
    if (what == 2 && model_->blocks.size() > 1) {
      const auto which = static_cast<size_t>(draw(1, static_cast<int>(model_->blocks.size()) - 1));
      for (auto* blocks : {model_.get(), reference_.get()}) blocks->remove(which);
      const Tensors left = buffers_of(*reference_);
      for (Tensors& buffers : buffers_) std::erase_if(buffers, [&](const auto& b) { return !left.contains(b.first); });
    }
    replica_->refresh();
  }

  // --- steps ---

  Plan plan_step(std::vector<bool> active) {
    Plan plan{{}, std::move(active)};
    for (int rank = 0; rank < world_size_; ++rank)
      plan.weights.push_back(options_.reduction == GradientReduction::kWeightedMean ? draw(rank == 0 ? 1 : 0, 50) : 1);
    return plan;
  }

  void take_step() {
    const Plan plan = plan_step(std::vector<bool>(index(world_size_), true));
    const Plan part = one_in(4) ? without_some(plan) : plan;
    set_weight(plan);
    local_.assign(index(world_size_), {});
    run_passes(plan, part);
    for (int rank = 0; rank < world_size_; ++rank)
      if (!part.active[index(rank)]) local_[index(rank)].clear();
    finish_step(part, /*by_initial=*/part.active == plan.active);
    update(draw(0, 3));
  }

  /// Some ranks skip their share, but not all. With sums, rank 0 counts what .grad held before; with weights, the other
  /// ranks may have weight 0.
  Plan without_some(Plan plan) {
    for (int rank = options_.reduction == GradientReduction::kMean ? 0 : 1; rank < world_size_; ++rank)
      if (std::count(plan.active.begin(), plan.active.end(), true) > 1) plan.active[index(rank)] = one_in(2);
    return plan;
  }

  void set_weight(const Plan& plan) {
    if (options_.reduction == GradientReduction::kWeightedMean)
      replica_->set_weight(plan.weights[index(context_.rank())]);
  }

  /// A few backward passes; only the last one reduces. Ranks that are not in `part` skip it.
  void run_passes(const Plan& plan, const Plan& part) {
    const int passes = draw(1, 3), how = draw(0, 2);
    const bool skips = !part.active[index(context_.rank())];
    const auto pass = [&](bool last = false) {
      const auto seed = static_cast<uint32_t>(draw(0, 1 << 30));
      last&& skips ? replica_->skip_step() : backward(*model_, seed, context_.rank());
      note_local(last ? part : plan, seed);
    };
    if (how == 0) {
      const auto accumulation = replica_->accumulate(passes);
      for (int i = 1; i <= passes; ++i) pass(/*last=*/i == passes);
      EXPECT_TRUE(accumulation.complete());
      return;
    }
    {
      const auto guard = replica_->no_sync();
      for (int i = 1; i < passes; ++i) pass();
    }
    if (how == 1 || passes == 1) return pass(/*last=*/true);
    skips ? replica_->skip_step() : replica_->reduce_gradients();
  }

  /// Ranks have inputs for 0 to 4 steps; those that run out take part in everything except gradients.
  void join() {
    update(/*way=*/2);
    std::vector<int> inputs;
    std::vector<uint32_t> seeds;
    std::vector<Plan> plans;
    for (int rank = 0; rank < world_size_; ++rank) inputs.push_back(draw(0, 4));
    for (int step = 0; step < *std::max_element(inputs.begin(), inputs.end()); ++step) {
      std::vector<bool> active;
      for (int count : inputs) active.push_back(step < count);
      seeds.push_back(static_cast<uint32_t>(draw(0, 1 << 30)));
      plans.push_back(plan_step(std::move(active)));
    }
    const bool by_initial = one_in(2) || options_.reduction != GradientReduction::kMean;
    size_t step = 0;
    const auto end_step = [&] {
      local_.assign(index(world_size_), {});
      note_local(plans[step], seeds[step]);
      finish_step(plans[step], by_initial);
      update(/*way=*/2);
      ++step;
    };
    const auto body = [&] {
      for (int i = 0; i < inputs[index(context_.rank())]; ++i) {
        set_weight(plans[step]);
        backward(*model_, seeds[step], context_.rank());
        end_step();
      }
    };
    replica_->join(body, {.divide_by_initial_world_size = by_initial, .shadow = end_step});
    EXPECT_EQ(step, plans.size());
    // The model of the first rank that had inputs in the last step.
    if (!plans.empty())
      buffers_.assign(index(world_size_), Tensors(buffers_[first_of(plans.back().active)]));
    else
      buffers_.assign(index(world_size_), Tensors(buffers_[0]));
    compare_buffers();
  }

  static size_t first_of(const std::vector<bool>& active) {
    return static_cast<size_t>(std::find(active.begin(), active.end(), true) - active.begin());
  }

  /// One backward of `rank`: forwards through blocks that depend on the rank, some several times, some recomputed.
  void backward(Blocks& model, uint32_t seed, int rank) const {
    std::mt19937 choose(seed + (seed % 3 == 0 ? static_cast<uint32_t>(rank) : 0));  // one in three differs by rank
    const auto any = [&](int low, int high) { return std::uniform_int_distribution(low, high)(choose); };
    std::vector<Recompute::Segment> segments;
    segments.reserve(32);
    const int blocks = static_cast<int>(model.blocks.size());
    at::Tensor loss = (model.blocks[0]->linear->weight * 0).sum();
    const int forwards = any(1, 2);
    for (int forward = 0; forward < forwards; ++forward) {
      at::Tensor x = formula({3, 5}, seed % 1000 + rank * 7 + forward).requires_grad_();
      const int length = any(1, blocks + 1);
      for (int i = 0; i < length; ++i) {
        auto block = model.blocks[static_cast<size_t>(any(0, blocks - 1))];
        segments.push_back([block](const at::Tensor& in) mutable { return block(in); });
        x = recomputes_ && any(0, 1) ? recompute(segments.back(), x) : segments.back()(x);
      }
      loss = loss + x.square().mean();
    }
    loss.backward();
  }

  // --- what one process computes ---

  /// Adds the gradients that the pass leaves on each active rank alone, and updates that rank's buffers.
  void note_local(const Plan& plan, uint32_t seed) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!plan.active[index(rank)]) continue;
      const auto parameters = parameters_of(*reference_);
      for (auto& [name, parameter] : parameters) at::Tensor(parameter).mutable_grad() = at::Tensor();
      set_buffers(*reference_, buffers_[index(rank)]);
      backward(*reference_, seed, rank);
      buffers_[index(rank)] = buffers_of(*reference_);
      for (const auto& [name, parameter] : parameters) {
        if (!parameter.grad().defined()) continue;
        at::Tensor& sum = local_[index(rank)][name];
        sum = sum.defined() ? sum + parameter.grad() : parameter.grad().clone();
      }
    }
  }

  static void set_buffers(Blocks& model, const Tensors& buffers) {
    for (const auto& item : model.named_buffers())
      if (!item.key().starts_with("again.")) at::Tensor(item.value()).copy_(buffers.at(item.key()));
  }

  double divisor(const Plan& plan, bool by_initial) const {
    if (options_.reduction == GradientReduction::kSum) return 1;
    double total = 0;
    for (int rank = 0; rank < world_size_; ++rank)
      if (plan.active[index(rank)] || (by_initial && options_.reduction == GradientReduction::kMean))
        total += plan.weights[index(rank)];
    return total;
  }

  void finish_step(const Plan& plan, bool by_initial) {
    synchronize_buffers(plan);
    compare_buffers();
    const double total = divisor(plan, by_initial);
    for (const auto& [name, parameter] : parameters_of(*model_)) {
      at::Tensor sum;
      double scale = carried_[name].defined() ? carried_[name].abs().max().item<double>() : 0;
      for (int rank = 0; rank < world_size_; ++rank) {
        const at::Tensor& gradient = local_[index(rank)][name];
        if (!gradient.defined()) continue;
        const double weight = plan.weights[index(rank)];
        const at::Tensor share = gradient.to(at::kDouble) * (total > 0 ? weight / total : 0);
        sum = sum.defined() ? sum + share : share;
        scale += share.abs().max().item<double>();
      }
      at::Tensor& expected = carried_[name];
      if (sum.defined()) expected = expected.defined() ? expected + sum : sum;
      compare(name, parameter, expected, scale);
      if (!exact_ && expected.defined() && !failed()) expected = parameter.grad().to(at::kDouble).clone();
    }
  }

  void compare(const std::string& name, const at::Tensor& parameter, const at::Tensor& expected, double scale) const {
    ASSERT_EQ(parameter.grad().defined(), expected.defined()) << name;
    if (!expected.defined()) return;
    const auto dtype = parameter.scalar_type();
    // A batch norm over three samples amplifies the last bit of its input, and the gradient of a bias before it is
    // nothing but rounding errors.
    double tolerance = dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 4e-2;
    // There is a layer of lower precision between this one and the loss.
    if (!exact_) tolerance = std::max(tolerance, mixes_dtypes_ ? 1e-4 : 0);
    tolerance = std::max(tolerance, dtype == at::kBFloat16 ? 0 : lossy_) * scale + (lossy_ > 0 ? 3e-7 : 1e-10);
    ASSERT_TRUE(at::allclose(parameter.grad().to(at::kDouble), expected, 0, tolerance))
        << name << "\n"
        << parameter.grad() << "\nexpected\n"
        << expected;
  }

  void synchronize_buffers(const Plan& plan) {
    if (options_.buffers == BufferPolicy::kNone || world_size_ == 1) return;
    const size_t root = first_of(plan.active);
    Tensors result = buffers_[root];
    if (options_.buffers == BufferPolicy::kMean)
      for (auto& [name, buffer] : result) {
        if (!buffer.is_floating_point()) continue;
        std::vector<at::Tensor> values;
        for (int rank = 0; rank < world_size_; ++rank)
          if (plan.active[index(rank)]) values.push_back(buffers_[index(rank)].at(name));
        buffer = at::stack(values).mean(0);
      }
    buffers_.assign(index(world_size_), result);
  }

  void compare_buffers() {
    for (const auto& [name, buffer] : buffers_of(*model_)) {
      const at::Tensor& expected = buffers_[index(context_.rank())].at(name);
      ASSERT_TRUE(at::allclose(buffer, expected, exact_ ? 1e-9 : 1e-4, exact_ ? 1e-10 : 1e-5))
          << name << "\n"
          << buffer << "\nexpected\n"
          << expected;
    }
  }

  /// A step of gradient descent, and zero_grad() in one of its two forms or not at all.
  void update(int way) {
    at::NoGradGuard no_grad;
    const auto parameters = parameters_of(*model_), others = parameters_of(*reference_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, parameter] = parameters[i];
      at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      at::Tensor(parameter).sub_(gradient, 0.05);
      at::Tensor(others[i].second).sub_(carried_[name].to(parameter.scalar_type()), 0.05);
      if (way == 0) continue;
      if (way == 1) {
        gradient.zero_();
        carried_[name] = at::zeros_like(carried_[name]);
      } else {
        at::Tensor(parameter).mutable_grad() = at::Tensor();
        carried_[name] = at::Tensor();
      }
    }
  }

  const Context& context_;
  const int world_size_;
  std::mt19937 random_;
  bool recomputes_ = false, mixes_dtypes_ = false;
  bool exact_ = true;  ///< everything is double; else the reference is set to the replica in each step
  double lossy_ = 0;   ///< the hook's error, relative to the ranks' shares
  DistributedDataParallelOptions options_;
  const std::shared_ptr<Blocks> model_ = std::make_shared<Blocks>(), reference_ = std::make_shared<Blocks>();
  std::optional<DistributedDataParallel<std::shared_ptr<Blocks>>> replica_;
  std::vector<Tensors> local_;    ///< gradients of each rank, since the last reduction
  Tensors carried_;               ///< expected .grad, in double
  std::vector<Tensors> buffers_;  ///< of each rank
};

struct Share {
  Engine engine;
  int first_seed, count;
  friend void PrintTo(const Share& share, std::ostream* out) { *out << name_of(share.engine); }
};

class RandomPrograms : public ::testing::TestWithParam<Share> {};
INSTANTIATE_TEST_SUITE_P(Engines, RandomPrograms,
                         ::testing::Values(Share{{1, ""}, 0, 40}, Share{{2, "shm"}, 1000, 140},
                                           Share{{3, "shm"}, 2000, 120}, Share{{4, "shm"}, 3000, 80},
                                           Share{{2, "gloo"}, 4000, 60}, Share{{3, "gloo"}, 5000, 40},
                                           Share{{4, "gloo"}, 6000, 20}),
                         [](const auto& instance) { return name_of(instance.param.engine); });

TEST_P(RandomPrograms, RaiseNoAlarmAndAgreeWithOneProcess) {
  const Share share = GetParam();
  const auto body = [&](Context& context) {
    const int times = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 5 : 1;
    for (int i = 0; i < share.count * times; ++i) {
      const int seed = share.first_seed + i % share.count + i / share.count * 10000;
      SCOPED_TRACE("seed " + std::to_string(seed));
      try {
        Program(seed, context).run();
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      if (::testing::Test::HasFailure()) return;  // the ranks may no longer run the same steps
    }
  };
  run_ranks(share.engine.world_size, body, std::chrono::seconds(110),
            {.backend = share.engine.backend, .announce = false});
}

class Bits : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {4, "shm"}, {3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Engines, Bits, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(Bits, AreThoseOfTheTreeAndOfEveryRun) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("shared"), other = make_model("shared");
    for (const double megabytes : {1e-6, 2e-4, 25.0, 25.0}) {
      DistributedDataParallel replica(
          model, context,
          {.first_bucket_cap_mb = megabytes, .bucket_cap_mb = megabytes, .reduction = GradientReduction::kSum});
      for (int step = 0; step < 3; ++step) {
        for (auto* module : {model.get(), other.get()}) module->zero_grad();
        loss_of(*model, batch(step, context.rank()), step, 0).backward();
        loss_of(*other, batch(step, context.rank()), step, 0).backward();
        for (size_t i = 0; i < model->parameters().size(); ++i) {
          const at::Tensor all = context.group().all_gather(other->parameters()[i].grad());
          EXPECT_TRUE(at::equal(model->parameters()[i].grad(), testing::tree_sum(all.unbind()))) << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::random_programs_test
