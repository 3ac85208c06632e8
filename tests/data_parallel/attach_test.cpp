#include <gtest/gtest.h>

#include <sys/resource.h>

#include <cstdlib>
#include <fstream>

#include <c10/util/Exception.h>
#include <lockstep/distributed_data_parallel.h>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "data_parallel/models.h"
#include "support/heard_warnings.h"
#include "support/ranks.h"

// What attaching compares, sends and notices. Where the number of messages is the promise, it is counted.

namespace lockstep::attach_test {
namespace {

using namespace testing;  // NOLINT

class Attaching : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, Attaching, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

using ModelReplica = DistributedDataParallel<std::shared_ptr<Model>>;

void backward(ModelReplica& replica, const Context& context, int step = 0) {
  replica(batch(step, context.rank()).data, step, 0).square().mean().backward();
}

/// Collective operations that `body` starts on this rank.
uint64_t messages(const Context& context, const std::function<void()>& body) {
  const uint64_t before = state_of(context.group()).sequence;
  body();
  return state_of(context.group()).sequence - before;
}

void expect_error(const std::string& part, const std::function<void()>& body) {
  std::string text = "no error";
  try {
    body();
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nhas no\n" << part;
}

torch::nn::BatchNorm1d buffers_alone() {
  return torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(8).affine(false));
}

TEST_P(Attaching, ALayerThatHoldsBuffersAloneIsNoticedBroadcastAndHashed) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    ModelReplica replica(model, context);
    backward(replica, context);
    auto norm = model->register_module("norm", buffers_alone());
    norm->running_mean.fill_(context.rank());
    expect_error("buffer norm.running_mean was added or replaced after DistributedDataParallel attached",
                 [&] { backward(replica, context); });
    expect_error("buffer norm.running_mean was added", [&] { replica.broadcast_parameters(); });
    replica.refresh();
    EXPECT_EQ(norm->running_mean[0].item<float>(), 0) << "not broadcast";
    backward(replica, context);

    const int last = context.world_size() - 1;
    if (last > 0) {
      if (context.rank() == last) norm->running_var[2] += 1;
      expect_error("buffer norm.running_var on rank " + std::to_string(last), [&] { replica.check_divergence(); });
      backward(replica, context);  // brings rank 0's
      EXPECT_EQ(norm->running_var[2].item<float>(), 1) << "not synchronised";
      replica.check_divergence();
    }
    model->replace_module("norm", buffers_alone());
    expect_error("buffer norm.running_mean was added or replaced", [&] { backward(replica, context); });
    replica.refresh();
    backward(replica, context);
    model->unregister_module("norm");
    expect_error("buffer norm.running_mean was removed", [&] { backward(replica, context); });
    replica.refresh();
    backward(replica, context);
  });
}

TEST_P(Attaching, ABufferThatIsIgnoredMayComeAndGo) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    const at::Tensor mask = model->register_buffer("mask", at::full({3}, context.rank()));
    const auto options = torch::nn::BatchNorm1dOptions(3).affine(false);
    auto layer = model->register_module("layer", torch::nn::BatchNorm1d(options));
    ModelReplica replica(
        model, context,
        {.parameters_to_ignore = {"mask", "layer.running_mean", "layer.running_var", "layer.num_batches_tracked"}});
    backward(replica, context);
    model->unregister_module("layer");
    for (int step = 0; step < 2; ++step) backward(replica, context, step);
    model->register_module("layer", layer);
    for (int step = 0; step < 3; ++step) backward(replica, context, step);
    replica.check_divergence();
    EXPECT_EQ(mask[0].item<int64_t>(), context.rank());
  });
}

TEST_P(Attaching, WithoutInitSyncRanksAreComparedAndNothingIsBroadcast) {
  run_ranks(GetParam(), [](Context& context) {
    const auto attach = [&](bool init_sync, bool& from_rank_zero) {
      auto model = make_model("batch_norm");
      {
        at::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.fill_(context.rank());
        for (auto& buffer : model->buffers()) buffer.fill_(context.rank());
      }
      const uint64_t sent = messages(context, [&] { ModelReplica(model, context, {.init_sync = init_sync}); });
      from_rank_zero = true;
      bool own = true;
      for (const auto& tensors : {model->parameters(), model->buffers()})
        for (const at::Tensor& tensor : tensors) {
          from_rank_zero = from_rank_zero && tensor.eq(0).all().item<bool>();
          own = own && tensor.eq(context.rank()).all().item<bool>();
        }
      EXPECT_TRUE(from_rank_zero || own);
      return sent;
    };
    bool synced = false, kept = false;
    const uint64_t with = attach(true, synced), without = attach(false, kept);
    EXPECT_TRUE(synced);
    EXPECT_EQ(kept, context.rank() == 0) << "something was broadcast";
    // The comparison is the same; the parameters and buffers of a small model are one message.
    EXPECT_EQ(with - without, context.world_size() == 1 ? 0u : 1u);
    if (context.world_size() == 1) return;
    EXPECT_GT(without, 0u) << "nothing was compared";
    auto model = make_model("plain");
    if (context.rank() == 1) model->to(at::kDouble);
    expect_error("parameter 0 is `fc1.weight: Float [8, 6] on cpu`",
                 [&] { ModelReplica(model, context, {.init_sync = false}); });
  });
}

TEST_P(Attaching, WithoutBuffersNothingIsSentForThem) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    const auto sent_in_a_step = [&](const char* name, BufferPolicy policy) {
      auto model = make_model(name);
      ModelReplica replica(model, context, {.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 1e-4, .buffers = policy});
      const uint64_t in_forward = messages(context, [&] {
        replica(batch(0, context.rank()).data, 0, 0);
        at::NoGradGuard no_grad;
        model->eval();
        replica(batch(0, context.rank()).data, 0, 0);
        model->train();
      });
      EXPECT_EQ(in_forward, 0u);
      const uint64_t sent = messages(context, [&] { backward(replica, context); });
      return sent - replica.bucket_parameters().size();
    };
    for (const auto policy : {BufferPolicy::kFollowRankZero, BufferPolicy::kMean, BufferPolicy::kNone})
      EXPECT_EQ(sent_in_a_step("plain", policy), 0u);
    EXPECT_EQ(sent_in_a_step("batch_norm", BufferPolicy::kFollowRankZero), 1u);
    EXPECT_EQ(sent_in_a_step("batch_norm", BufferPolicy::kMean), 2u);  // the count of batches follows rank 0
    EXPECT_EQ(sent_in_a_step("batch_norm", BufferPolicy::kNone), 0u);
  });
}

// Tensors on "meta" stand for tensors on a device without an engine.
TEST_P(Attaching, ToADeviceWithoutAnEngineIsRefusedWithAdvice) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    const at::Tensor there = at::ones({3}, at::device(at::kMeta)).requires_grad_();
    std::string text;
    try {
      DistributedDataParallel(NamedTensors{{"a", there}}, context);
    } catch (const Error& error) {
      text = error.what();
    }
    const bool is_told = text.find("build it with a LibTorch for CUDA and with nccl.h") != std::string::npos ||
                         text.find("tensors are communicated on the CPU and on CUDA, not on meta") != std::string::npos;
    EXPECT_TRUE(is_told) << text;
    const at::Tensor sum = at::ones({3});
    context.group().all_reduce(sum);  // and the group is as it was
    EXPECT_EQ(sum[0].item<float>(), context.world_size());
  });
}

/// Whether backward leaves the mean over the ranks, which differs from every rank's own gradient. Those are squares.
bool is_reduced(const Context& context, const at::Tensor& parameter) {
  parameter.mutable_grad().reset();
  (parameter * (context.rank() * context.rank())).sum().backward();
  double sum = 0;
  for (int rank = 0; rank < context.world_size(); ++rank) sum += rank * rank;
  return at::allclose(parameter.grad(), at::full(parameter.sizes(), sum / context.world_size(), at::kFloat));
}

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// A tensor of that many MiB in the memory of one element: only its gradient needs memory.
at::Tensor of_mebibytes(int64_t count) { return at::zeros({1}).expand({count << 18}).requires_grad_(); }

/// While it exists, this process can get at most 16 MiB more memory. Shared memory was reserved before.
class LittleMemory {
 public:
  explicit LittleMemory(bool on) {
    getrlimit(RLIMIT_AS, &before_);
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    if (on) limit.rlim_cur = static_cast<rlim_t>(pages) * 4096 + (16 << 20);
    setrlimit(RLIMIT_AS, &limit);
  }
  ~LittleMemory() { setrlimit(RLIMIT_AS, &before_); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_;
};

// The old hooks were once removed before the new ones were made, so training went on silently without any reduction.
TEST_P(Attaching, ARefreshThatThrowsLeavesWhatWasFollowedReduced) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
    const int last = context.world_size() - 1;
    DistributedDataParallel replica(NamedTensors{{"a", a}}, context);
    const auto refused = [&](const std::string& why, const NamedTensors& list, bool little_memory = false) {
      std::string text;
      {
        const LittleMemory limit(little_memory);
        text = failure_of([&] { replica.refresh(list); });
      }
      EXPECT_NE(text.find(why), std::string::npos) << text << "\nhas no\n" << why;
      EXPECT_TRUE(is_reduced(context, a)) << "after: " << why;
      EXPECT_EQ(is_reduced(context, b), last == 0) << "b was never followed, yet it is after: " << why;
    };
    refused("is the result of an operation", {{"a", a}, {"b", b * 2}});
    refused("two parameters of the list are named a", {{"a", a}, {"a", b}});
    refused("are the same tensor", {{"a", a}, {"b", b}, {"c", b}});
    refused("no parameter that requires grad", {{"c", at::ones({3})}});
    if (last == 0) return;  // nothing is reduced in a world of one, so nothing needs memory
    refused("the ranks do not hold the same model", {{"a", a}, {context.rank() == last ? "c" : "b", b}});
    refused("rank", {{"a", a}, {"large", of_mebibytes(int64_t{1} << 40)}});
    if (GetParam().backend == "gloo")
      refused("rank " + std::to_string(last) + ": ", {{"a", a}, {"large", of_mebibytes(64)}}, context.rank() == last);
    replica.refresh({{"a", a}, {"b", b}});
    EXPECT_TRUE(is_reduced(context, a));
    EXPECT_TRUE(is_reduced(context, b));
  });
}

TEST_P(Attaching, ARefreshKeepsTheWeightOfTheRank) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor a = at::ones({1}).requires_grad_();
    DistributedDataParallel replica(NamedTensors{{"a", a}}, context, {.reduction = GradientReduction::kWeightedMean});
    replica.set_weight(context.rank() == 0 ? 3 : 0);
    replica.refresh();
    (a * (context.rank() + 1)).sum().backward();
    EXPECT_EQ(a.grad().item<float>(), 1) << "not rank 0's alone";
  });
}

// set_data() drops autograd's accumulator with our hook. A conversion there and back needs no refresh().
TEST_P(Attaching, AModuleConvertedThereAndBackIsReducedAsBefore) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    ModelReplica replica(model, context);
    const auto gradients = [&] {
      model->zero_grad();
      loss_of(*model, batch(1, context.rank()), 1, 0).backward();
      std::vector<at::Tensor> all;
      for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad().flatten().clone());
      return at::cat(all);
    };
    const at::Tensor before = gradients();
    for (int i = 0; i < 3; ++i) {
      model->to(at::kDouble);
      model->to(at::kFloat);
      EXPECT_TRUE(at::allclose(gradients(), before, 1e-6, 1e-7));
    }
    if (context.world_size() > 1)
      expect_error("ranks", [&] {
        model->to(at::kDouble);
        loss_of(*model, batch(1, context.rank(), at::kDouble), 1, 0).backward();
      });
    model->zero_grad();
    replica.refresh();
    loss_of(*model, batch(1, context.rank(), model->parameters()[0].scalar_type()), 1, 0).backward();
    const at::Tensor all = context.group().all_gather(model->parameters()[0].grad());
    EXPECT_TRUE(at::equal(all[0], all[context.world_size() - 1]));
  });
}

// What could be mistaken for a forgotten edit.
TEST_P(Attaching, BackwardThroughWhatOthersFollowIsNobodyElsesMatter) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain"), unrelated = make_model("plain");
    model->parameters()[0].set_requires_grad(false);
    ModelReplica replica(model, context);
    ModelReplica other(unrelated, context);
    auto layer = model->register_module("extra", torch::nn::Linear(2, 2));
    backward(other, context);  // a backward of another model, between an edit and its refresh
    torch::autograd::grad({layer->weight.sum()}, {layer->weight});
    replica.refresh();
    backward(replica, context);

    // Another object trains what is frozen here.
    const at::Tensor frozen = model->parameters()[0];
    frozen.set_requires_grad(true);
    torch::autograd::grad({frozen.sum()}, {frozen});
    DistributedDataParallel trainer(NamedTensors{{"frozen", frozen}}, context);
    EXPECT_TRUE(is_reduced(context, frozen));
  });
}

TEST_P(Attaching, ALayerThatNoOptimizerHoldsIsNamedAfterTenReductions) {
  run_ranks(GetParam(), [](Context& context) {
    const c10::WarningUtils::WarnAlways always;
    const auto warnings_of = [&](bool told, int steps) {
      const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_(),
                       unused = at::ones({3}).requires_grad_();
      DistributedDataParallel replica(NamedTensors{{"a", a}}, context);
      torch::optim::SGD optimizer(std::vector<at::Tensor>{a}, 0.1);
      replica.refresh({{"a", a}, {"b", b}, {"unused", unused}});
      if (told) optimizer.add_param_group(std::vector<at::Tensor>{b});
      const testing::HeardWarnings heard;
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        b.mutable_grad().reset();
        (a * b * (step == 0 ? 0 : 1)).sum().backward();  // the first gradient is 0, which does not count
        optimizer.step();
      }
      return heard.text();
    };
    EXPECT_EQ(warnings_of(true, 40), "");
    EXPECT_EQ(warnings_of(false, 11), "") << "too early: nine reductions without a change";
    const std::string text = warnings_of(false, 40);
    if (context.rank() == 0) {
      EXPECT_NE(
          text.find("no optimizer seems to hold a parameter that refresh() added: b had a gradient 10 reductions ago"),
          std::string::npos)
          << text;
      EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    } else {
      EXPECT_EQ(text, "") << "only rank 0 warns";
    }
  });
}

/// Filled with one value, so making it takes only as long as touching its memory.
struct Large : torch::nn::Module {
  Large() {
    for (int i = 0; i < 25; ++i)
      register_parameter(c10::str("w", i), at::zeros({2000, 2000}).fill_(0.5).requires_grad_());
  }
};

/// How long this thread has waited for a processor so far.
double seconds_in_queue() {
  std::ifstream file("/proc/thread-self/schedstat");
  double running_ns = 0, waiting_ns = 0;
  file >> running_ns >> waiting_ns;
  return waiting_ns / 1e9;
}

// As docs/step.md says. What other programs take of the processors does not count: each rank waits for the other as
// long as that one waits for a processor.
TEST(AttachingALargeModel, TakesLessThanASecond) {
  if (std::getenv("LOCKSTEP_NIGHTLY") == nullptr)
    GTEST_SKIP() << "SKIPPED BECAUSE 100 M parameters on two ranks (2 GiB) are for make test-nightly";
  run_ranks({2, "shm"}, [](Context& context) {
    const auto model = std::make_shared<Large>();
    context.group().barrier();
    const double queued = seconds_in_queue();
    const auto start = Clock::now();
    const DistributedDataParallel replica(model, context);
    const double seconds = seconds_since(start);
    at::Tensor in_queue = at::scalar_tensor(seconds_in_queue() - queued, at::kDouble);
    context.group().all_reduce(in_queue);
    EXPECT_LT(seconds - in_queue.item<double>(), 1);
    if (context.is_main())
      std::printf("attaching 100 M parameters took %.2f s, of which the ranks waited %.2f s for processors\n", seconds,
                  in_queue.item<double>());
  });
}

}  // namespace
}  // namespace lockstep::attach_test
