#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"

// Steps of slices, by the optimizer's own step() or on ranks that share no memory, against each rank stepping its own
// copy: the same bits.

namespace lockstep {
namespace {

using testing::Engine;
using testing::run_ranks;
using torch::optim::AdagradOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::RMSpropOptions;
using torch::optim::SGDOptions;

/// `sometimes` is used in every other step, `never` by nobody. Slices begin and end within parameters of odd sizes.
struct SlicedNet : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& input, int step) {
    torch::Tensor hidden = torch::tanh(first(input));
    if (step % 2 == 0) hidden = hidden + sometimes(input);
    return last(hidden);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(19, 67))};
  torch::nn::Linear sometimes{register_module("sometimes", torch::nn::Linear(19, 67))};
  torch::nn::Linear never{register_module("never", torch::nn::Linear(3, 5))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(67, 7))};
};
using Sliced = std::shared_ptr<SlicedNet>;
using SlicedModel = DistributedDataParallel<Sliced>;

Sliced make_sliced(at::ScalarType type) {
  torch::manual_seed(5);
  auto net = std::make_shared<SlicedNet>();
  net->to(type);
  return net;
}

at::Tensor sliced_loss(SlicedModel& model, int rank, int step) {
  const at::Tensor input =
      torch::sin(torch::arange(8 * 19, torch::kDouble).reshape({8, 19}) * (0.1 * (rank + 1)) + step);
  return model(input.to(model.module()->first->weight.scalar_type()), step).square().mean();
}

void train_sliced(SlicedModel& model, torch::optim::Optimizer& optimizer, int rank, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    sliced_loss(model, rank, step).backward();
    model.clip_grad_norm(0.5);
    for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.98);
    optimizer.step();
  }
}

/// Weights and biases, these at another rate.
template <typename Options>
std::vector<OptimizerParamGroup> sliced_groups(SlicedNet& net, const Options& options) {
  Options other = options;
  other.lr(options.lr() * 0.5);
  std::vector<at::Tensor> weights, biases;
  for (const at::Tensor& parameter : net.parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<Options>(options));
  groups.emplace_back(biases, std::make_unique<Options>(other));
  return groups;
}

void expect_same_parameters(const SlicedNet& mine, const SlicedNet& theirs) {
  const auto expected = theirs.named_parameters();
  for (const auto& item : mine.named_parameters()) EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
}

/// Steps by the sign of a running mean; keeps that where only it knows, and has a type of state of its own.
class SignOfMean : public torch::optim::Optimizer {
 public:
  explicit SignOfMean(const std::vector<OptimizerParamGroup>& groups, SGDOptions defaults = 1e-2)
      : Optimizer(groups, std::make_unique<SGDOptions>(defaults)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::NoGradGuard no_grad;
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    for (auto& group : param_groups())
      for (at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        EXPECT_GT(parameter.numel(), 0);
        at::Tensor& mean = means_[parameter.unsafeGetTensorImpl()];
        if (!mean.defined()) mean = at::zeros_like(parameter);
        mean.mul_(0.9).add_(parameter.grad(), 0.1);
        parameter.sub_(mean.sign().mul_(group.options().get_lr()));
      }
    return loss;
  }

 private:
  std::map<void*, at::Tensor> means_;
};

/// `Reference` is made from parameters, on each rank.
template <typename Optimizer, typename Reference, typename Options>
void compare_slices(const Engine& engine, const Options& options, at::ScalarType type,
                    ZeroRedundancyOptions with = {}) {
  SCOPED_TRACE(engine.backend + (with.shared_parameters ? ", shared" : "") + ", " + c10::toString(type));
  run_ranks(engine, [&](Context& context) {
    at::set_num_threads(1);
    const Sliced mine = make_sliced(type), theirs = make_sliced(type);
    SlicedModel model(mine, context), reference_model(theirs, context);
    {
      ZeroRedundancyOptimizer<Optimizer> sliced(model, sliced_groups(*mine, options), options, with);
      Reference reference(sliced_groups(*theirs, options), options);
      for (const at::Tensor& parameter : mine->parameters())
        EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.const_data_ptr()) % 64, 0u);
      train_sliced(model, sliced, context.rank(), 0, 12);
      train_sliced(reference_model, reference, context.rank(), 0, 12);
      expect_same_parameters(*mine, *theirs);
      EXPECT_FALSE(mine->last->weight.equal(make_sliced(type)->last->weight)) << "nothing was trained";
      if constexpr (detail::state_is_known<Optimizer>()) {
        const StateDict state = state_dict(sliced), expected = state_dict(reference);
        ASSERT_EQ(state.keys(), expected.keys());
        for (const auto& item : expected) EXPECT_TRUE(item.value().equal(state[item.key()])) << item.key();
      }
      train_sliced(model, sliced, context.rank(), 12, 16);
      train_sliced(reference_model, reference, context.rank(), 12, 16);
      expect_same_parameters(*mine, *theirs);
      context.group().barrier();
    }
    // Each has its own memory again.
    expect_same_parameters(*mine, *theirs);
    mine->first->bias.data().fill_(context.rank());
    context.group().barrier();
    EXPECT_EQ(mine->first->bias[0].item<double>(), context.rank());
  });
}

/// One of ours that steps all of its parameters, with masters.
struct MasteredAdamW : ZeroRedundancyOptimizer<torch::optim::AdamW> {
  MasteredAdamW(const std::vector<OptimizerParamGroup>& groups, AdamWOptions options)
      : ZeroRedundancyOptimizer(groups, std::move(options), {.master_weights = true}) {}
};

TEST(SliceStep, HasTheBitsOfEachRankAloneOverGloo) {
  using torch::optim::AdamW;
  using torch::optim::SGD;
  for (const Engine& engine : {Engine{2, "gloo"}, Engine{3, "gloo"}}) {
    compare_slices<SGD, ZeroRedundancyOptimizer<SGD>>(engine, SGDOptions(0.05).momentum(0.9).weight_decay(1e-3),
                                                      at::kFloat);
    compare_slices<AdamW, ZeroRedundancyOptimizer<AdamW>>(engine, AdamWOptions(1e-2).amsgrad(true), at::kDouble);
    compare_slices<AdamW, MasteredAdamW>(engine, AdamWOptions(1e-2), at::kBFloat16, {.master_weights = true});
  }
}

TEST(SliceStep, HasTheBitsOfAnOptimizersOwnStep) {
  using torch::optim::Adagrad;
  using torch::optim::RMSprop;
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
    for (const bool shared : {false, true}) {
      if (shared && engine.backend == "gloo") continue;
      const ZeroRedundancyOptions with{.shared_parameters = shared};
      compare_slices<RMSprop, RMSprop>(engine, RMSpropOptions(1e-3).momentum(0.9).centered(true), at::kFloat, with);
      compare_slices<RMSprop, RMSprop>(engine, RMSpropOptions(1e-2).weight_decay(1e-3), at::kBFloat16, with);
      compare_slices<Adagrad, Adagrad>(engine, AdagradOptions(1e-2).initial_accumulator_value(0.1), at::kDouble, with);
      compare_slices<SignOfMean, SignOfMean>(engine, SGDOptions(1e-3), at::kFloat, with);
    }
}

TEST(SliceStep, OneRankStepsByItself) {
  compare_slices<torch::optim::RMSprop, torch::optim::RMSprop>({1, ""}, RMSpropOptions(1e-2), at::kFloat);
}

/// Trains `from` .. `to` with AdamW made from the model; resumes from `path` if there is a file, and saves there.
void train_through(const Engine& engine, const std::string& path, int from, int to, const std::string& parameters) {
  run_ranks(engine, [&](Context& context) {
    const Sliced net = make_sliced(at::kFloat);
    SlicedModel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2).amsgrad(true));
    if (from > 0) {
      load_state_dict(*net, load(parameters).tensors);
      load_optimizer_state_dict(optimizer, load_object(path));
    }
    // The same gradients on any number of ranks.
    train_sliced(model, optimizer, 0, from, to);
    const c10::IValue state = optimizer_state_dict(optimizer);
    context.group().barrier();  // all have read
    if (context.rank() == 0) {
      save(state_dict(*net), parameters);
      save_object(state, path);
    }
    context.group().barrier();
  });
}

void expect_same_files(const std::string& one, const std::string& other) {
  const StateDict mine = load(one).tensors, theirs = load(other).tensors;
  ASSERT_EQ(mine.keys(), theirs.keys());
  ASSERT_GT(mine.size(), 0u);
  for (const auto& item : mine) EXPECT_TRUE(item.value().equal(theirs[item.key()])) << item.key() << " in " << other;
}

TEST(SliceStep, GlooAndSharedMemoryHaveTheSameBitsAndTakeEachOthersStates) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  for (const int ranks : {2, 3})
    for (const char* engine : {"shm", "gloo"}) {
      const std::string name = engine + std::to_string(ranks);
      train_through({ranks, engine}, in_folder(name + ".pt"), 0, 6, in_folder(name + ".safetensors"));
    }
  expect_same_files(in_folder("shm2.pt"), in_folder("gloo2.pt"));
  expect_same_files(in_folder("shm3.pt"), in_folder("gloo3.pt"));
  expect_same_files(in_folder("shm3.safetensors"), in_folder("gloo3.safetensors"));
  // From Gloo to shared memory, and the reverse, with another number of ranks.
  train_through({2, "shm"}, in_folder("gloo3.pt"), 6, 10, in_folder("gloo3.safetensors"));
  train_through({2, "gloo"}, in_folder("shm3.pt"), 6, 10, in_folder("shm3.safetensors"));
  expect_same_files(in_folder("gloo3.pt"), in_folder("shm3.pt"));
  expect_same_files(in_folder("gloo3.safetensors"), in_folder("shm3.safetensors"));
}

TEST(SliceStep, CheckpointerSavesAndResumesOverGloo) {
  const TemporaryFolder folder;
  const auto train = [&](int from, int to, bool saves) {
    run_ranks(Engine{3, "gloo"}, [&](Context& context) {
      const Sliced mine = make_sliced(at::kFloat), theirs = make_sliced(at::kFloat);
      SlicedModel model(mine, context), reference_model(theirs, context);
      ZeroRedundancyOptimizer optimizer(model, RMSpropOptions(1e-3).momentum(0.9));
      torch::optim::RMSprop reference(theirs->parameters(), RMSpropOptions(1e-3).momentum(0.9));
      Checkpointer checkpointer(folder.path().string(), context.group());
      checkpointer.add("model", *mine).add("optimizer", optimizer);
      if (!saves) {
        EXPECT_TRUE(checkpointer.resume());
        EXPECT_EQ(checkpointer.resumed_step(), from);
      }
      train_sliced(model, optimizer, context.rank(), from, to);
      if (saves) checkpointer.save(to);
      train_sliced(model, optimizer, context.rank(), to, to + 3);
      train_sliced(reference_model, reference, context.rank(), 0, to + 3);
      expect_same_parameters(*mine, *theirs);
      context.group().barrier();
    });
  };
  train(0, 5, true);
  train(5, 7, false);
}

int64_t resident_pages(const at::Tensor& tensor) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) / page * page;
  const size_t bytes = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + tensor.nbytes() - begin;
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), bytes, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char one) { return (one & 1) != 0; });
}

TEST(SliceStep, ARankHasMemoryForItsSliceOfTheStateOnly) {
  for (const int ranks : {2, 3})
    run_ranks(Engine{ranks, "gloo"}, [](Context& context) {
      torch::nn::Linear net(512, 1024);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      const auto step = [&] {
        optimizer.zero_grad();
        model(at::ones({4, 512})).square().mean().backward();
        optimizer.step();
        const auto& state = optimizer.state().at(net->weight.unsafeGetTensorImpl());
        return static_cast<torch::optim::AdamWParamState&>(*state).exp_avg();
      };
      const int64_t all = (512 * 1024 * 4) / ::sysconf(_SC_PAGESIZE), share = all / context.world_size() + 5;
      EXPECT_LE(resident_pages(step()), share);
      const StateDict state = state_dict(optimizer);
      EXPECT_EQ((state["0.exp_avg"] == 0).sum().item<int64_t>(), 0);
      EXPECT_LE(resident_pages(step()), share);
    });
}

template <typename Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}
#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(SliceStep, SaysWhatItCannotDo) {
  for (const Engine& engine : {Engine{2, "gloo"}, Engine{3, "gloo"}, Engine{2, "shm"}})
    run_ranks(engine, [&](Context& context) {
      const Sliced net = make_sliced(at::kFloat);
      SlicedModel model(net, context);
      if (engine.backend == "gloo") {
        const std::string text =
            refusal([&] { ZeroRedundancyOptimizer(model, AdamWOptions(1e-2), {.shared_parameters = true}); });
        EXPECT_SAYS(text, "shared_parameters = true needs ranks that share memory, and this group's engine is gloo");
      }
      ZeroRedundancyOptimizer<SignOfMean> optimizer(model, sliced_groups(*net, SGDOptions(1e-3)), SGDOptions(1e-3));
      train_sliced(model, optimizer, context.rank(), 0, 2);
      const char* const kOwn = "belongs to the slices of each rank";
      EXPECT_SAYS(refusal([&] { (void)state_dict(optimizer); }), kOwn);
      EXPECT_SAYS(refusal([&] { (void)optimizer_state_dict(optimizer); }), kOwn);
      EXPECT_SAYS(refusal([&] { load_state_dict(optimizer, StateDict()); }), kOwn);
      EXPECT_SAYS(refusal([&] { load_optimizer_state_dict(optimizer, c10::IValue()); }), kOwn);
      std::ostringstream archive;
      EXPECT_SAYS(refusal([&] { torch::save(optimizer, archive); }), kOwn);
      context.group().barrier();
    });
}

/// What step() says on each rank after `spoil`, and that it changes nothing.
template <typename Spoil>
void expect_all_refuse(const std::string& part, const Spoil& spoil) {
  for (const Engine& engine : {Engine{2, "gloo"}, Engine{3, "shm"}})
    run_ranks(engine, [&](Context& context) {
      const Sliced net = make_sliced(at::kFloat);
      SlicedModel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, RMSpropOptions(1e-2));
      const at::Tensor before = net->last->weight.detach().clone();
      const std::string text = refusal([&] {
        sliced_loss(model, context.rank(), 0).backward();
        spoil(context.rank(), model, optimizer);
        optimizer.step();
      });
      EXPECT_SAYS(text, part);
      EXPECT_TRUE(net->last->weight.equal(before));
      context.group().barrier();
    });
}

TEST(SliceStep, AllRanksRefuseWhatOneCannotDo) {
  using Optimizer = torch::optim::Optimizer;
  expect_all_refuse("rank 1 would step other parameters than rank 0, at another rate",
                    [](int rank, SlicedModel&, Optimizer& optimizer) {
                      if (rank == 1) optimizer.param_groups()[0].options().set_lr(1);
                    });
  expect_all_refuse("rank 1 has other gradients than rank 0", [](int rank, SlicedModel& model, Optimizer&) {
    if (rank == 1) model.module()->first->bias.mutable_grad() = at::ones({67});
  });
  expect_all_refuse("of 1 backward pass wait in .grad", [](int rank, SlicedModel& model, Optimizer&) {
    const auto local = model.no_sync();
    sliced_loss(model, rank, 0).backward();
  });
  expect_all_refuse("rank 1: ZeroRedundancyOptimizer: parameter first.bias is no longer",
                    [](int rank, SlicedModel& model, Optimizer&) {
                      if (rank == 1) model.module()->first->bias.set_data(at::ones({67}));
                    });
}

}  // namespace
}  // namespace lockstep
