#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <optional>
#include <thread>
#include <utility>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/clock.h"
#include "support/heard_warnings.h"
#include "support/ranks.h"

// Backward passes after which nothing was averaged, or something wrong was: each must be an error on every rank, within
// seconds, that says what it was.

namespace lockstep::wrong_backwards_test {
namespace {

using namespace testing;  // NOLINT

const std::vector<Engine> kEngines{{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};

void on_every_engine(const std::function<void(Context&)>& body) {
  for (const Engine& engine : kEngines)
    run_ranks(engine.world_size, body, std::chrono::seconds(30),
              {.collective_timeout = std::chrono::seconds(25), .backend = engine.backend, .announce = false});
}

/// The text of what `body` throws, within five seconds.
std::string error_of(const std::function<void()>& body) {
  const auto start = Clock::now();
  std::string text = "no error";
  try {
    body();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 5);
  return text;
}

#define EXPECT_IN(part, text) EXPECT_NE((text).find(part), std::string::npos) << (text)

/// A hook made of a function.
struct Custom : CommHook {
  using Reduce = std::function<Finish(const GradientBucket& bucket, const Group& group)>;
  explicit Custom(Reduce the_reduce) : reduce_(std::move(the_reduce)) {}
  Finish reduce(const GradientBucket& bucket, const Group& group) override { return reduce_(bucket, group); }
  Reduce reduce_;
};

/// What backward throws with the hook, in a model of one bucket and in one of several.
void expect_of_hook(const std::string& part, const Custom::Reduce& reduce) {
  on_every_engine([&](Context& context) {
    for (const double cap : {25.0, 1e-5}) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      DistributedDataParallel model(net, context, {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap});
      model.register_comm_hook(std::make_shared<Custom>(reduce));
      const std::string text = error_of([&] { model(at::ones({2, 4})).sum().backward(); });
      EXPECT_IN(part, text);
      model.register_comm_hook(nullptr);
      context.group().barrier();
    }
  });
}

TEST(WrongHooks, ReturnNothing) {
  expect_of_hook("the communication hook returned no function", [](const GradientBucket& bucket, const Group& group) {
    group.all_reduce(bucket.gradients, bucket.op);
    return CommHook::Finish();
  });
}

TEST(WrongHooks, ResizeOrReplaceTheBucket) {
  const char* const part = "the communication hook has given `gradients` another size or other memory";
  expect_of_hook(part, [](const GradientBucket& bucket, const Group&) {
    return [gradients = bucket.gradients] { gradients.resize_({gradients.numel() / 2}); };
  });
  expect_of_hook(part, [](const GradientBucket& bucket, const Group&) {
    return [gradients = bucket.gradients] { gradients.set_data(at::zeros_like(gradients)); };
  });
}

TEST(WrongHooks, ResizeOrReplaceAPart) {
  const char* const part = "the communication hook has given a tensor of `parts` another size or other memory";
  expect_of_hook(part, [](const GradientBucket& bucket, const Group&) {
    return [last = bucket.parts.back()] { last.resize_({last.numel() + 1}); };
  });
  expect_of_hook(part, [](const GradientBucket& bucket, const Group&) {
    bucket.parts.front().set_data(at::zeros_like(bucket.parts.front()));
    return [] {};
  });
}

TEST(WrongHooks, ThrowAtTheirEndOnOneRank) {
  expect_of_hook("rank 1: the communication hook failed: no more luck",
                 [](const GradientBucket& bucket, const Group& group) {
                   Work work = group.all_reduce_async(bucket.gradients, bucket.op);
                   return [work, last = group.rank() == 1]() mutable {
                     work.wait();
                     if (last) throw std::runtime_error("no more luck");
                   };
                 });
}

TEST(WrongHooks, ThrowBeforeTheyHaveSentAnythingOnAllRanks) {
  expect_of_hook(
      "the communication hook failed: not today",
      [](const GradientBucket&, const Group&) -> CommHook::Finish { throw std::runtime_error("not today"); });
}

/// The others have sent what this rank has not, so that two different things meet; all are told why.
void expect_of_hook_on_one_rank(const std::string& part, const std::function<CommHook::Finish()>& instead) {
  on_every_engine([&](Context& context) {
    for (const double cap : {25.0, 1e-5}) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      DistributedDataParallel model(net, context.group().split(0), {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap});
      model.register_comm_hook(
          std::make_shared<Custom>([&](const GradientBucket& bucket, const Group& group) -> CommHook::Finish {
            if (group.rank() == 1) return instead();
            return [work = group.all_reduce_async(bucket.gradients, bucket.op)]() mutable { work.wait(); };
          }));
      const std::string text = error_of([&] { model(at::ones({2, 4})).sum().backward(); });
      EXPECT_IN(part, text);
      EXPECT_EQ(text.find("same number of backward passes"), std::string::npos) << text;
      context.group().barrier();
    }
  });
}

TEST(WrongHooks, FailBeforeTheyHaveSentAnythingOnOneRank) {
  expect_of_hook_on_one_rank("not here", []() -> CommHook::Finish { throw std::runtime_error("not here"); });
  expect_of_hook_on_one_rank("an object that is not a std::exception", []() -> CommHook::Finish { throw 42; });
  expect_of_hook_on_one_rank("returned no function", [] { return CommHook::Finish(); });
}

/// A list of which somebody else trains other tensors beside.
TEST(WrongLists, AreNotThoseBesideWhichSomethingElseIsTrained) {
  on_every_engine([](Context& context) {
    at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
    const at::Tensor other = at::ones({3}).requires_grad_();
    DistributedDataParallel model(NamedTensors{{"a", a}, {"b", b}}, context);
    torch::optim::SGD optimizer({a, b}, 0.1);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(error_of([&] { (other * (context.rank() + 1)).sum().backward(); }), "no error");
      EXPECT_EQ(error_of([&] { (a * b * (context.rank() + 1)).sum().backward(); }), "no error");
      optimizer.step(), optimizer.zero_grad();
      if (step == 1) model.refresh();
    }
    const at::Tensor kept = a;  // under another name
    a = at::ones({3}).requires_grad_();
    EXPECT_EQ(error_of([&] { (kept * b).sum().backward(); }), "no error");
    model.refresh({{"a", a}, {"b", b}});
    EXPECT_EQ(error_of([&] { (a * b).sum().backward(); }), "no error");
    // A list that only the object itself holds, and hands out.
    const DistributedDataParallel whole(NamedTensors{{"c", at::ones({3}).requires_grad_()}}, context);
    const at::Tensor& c = whole.module()[0].second;
    for (int step = 0; step < 3; ++step) EXPECT_EQ(error_of([&] { (c * 2).sum().backward(); }), "no error");
  });
}

/// The sharded optimizer itself holds the tensors that were replaced.
TEST(WrongLists, WithoutAGradientAreNotSteppedByAShardedStep) {
  on_every_engine([](Context& context) {
    at::Tensor a = at::ones({3}).requires_grad_();
    DistributedDataParallel model(NamedTensors{{"a", a}}, context);
    ZeroRedundancyOptimizer optimizer(model, torch::optim::SGDOptions(0.1));
    a.sum().backward();
    optimizer.step();
    optimizer.zero_grad();
    a = at::ones({3}).requires_grad_();
    a.sum().backward();
    EXPECT_IN("no backward has reached a parameter of the list that DistributedDataParallel follows (a) on any rank",
              error_of([&] { optimizer.step(); }));
  });
}

TEST(TwoThreads, InBackwardOfOneModelAreNamed) {
  on_every_engine([](Context& context) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8), torch::nn::Linear(8, 2));
    DistributedDataParallel model(net, context);
    // A hook of the graph's end holds each thread until both are within their backward.
    std::barrier both(2);
    std::vector<std::string> texts(2);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; ++i)
      threads.emplace_back([&, i] {
        at::Tensor x = at::ones({2, 8}).requires_grad_();
        const at::Tensor middle = net[0]->as<torch::nn::Linear>()->forward(x);
        std::once_flag once;
        const at::Tensor out =
            net[2]->as<torch::nn::Linear>()->forward(net[1]->as<torch::nn::Linear>()->forward(middle));
        middle.register_hook([&](const at::Tensor&) { std::call_once(once, [&] { both.arrive_and_wait(); }); });
        texts[i] = error_of([&] { out.sum().backward(); });
      });
    for (std::thread& thread : threads) thread.join();
    const std::string all = texts[0] + texts[1];
    EXPECT_IN("was reached by the backward of one thread while that of another was still running", all);
  });
}

TEST(TwoThreads, InStepOfOneOptimizerAreNamed) {
  on_every_engine([](Context& context) {
    torch::nn::Linear net(4, 3);
    DistributedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, torch::optim::SGDOptions(0.1));
    model(at::ones({2, 4})).sum().backward();
    std::vector<std::string> texts(2);
    // A closure runs before the lock, so the threads meet here and one is in step() for as long as the others are away.
    if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (context.rank() == 1) {
      optimizer.step();
      return;
    }
    std::thread other([&] { texts[0] = error_of([&] { optimizer.step(); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    texts[1] = error_of([&] { optimizer.step(); });
    other.join();
    EXPECT_EQ(texts[0], "no error");
    EXPECT_IN("step() was called while another thread was in it", texts[1]);
  });
}

TEST(WrongPolicies, ThatDifferAreNamed) {
  using enum NonFinitePolicy;
  const auto name_of = [](NonFinitePolicy policy) {
    return policy == kIgnore ? "kIgnore" : policy == kSkip ? "kSkip" : "kRaise";
  };
  on_every_engine([&](Context& context) {
    const int last = context.world_size() - 1;
    for (const auto& [one, other] : {std::pair(kIgnore, kSkip), {kIgnore, kRaise}, {kSkip, kRaise}})
      for (const bool all_but_one : {false, true}) {
        torch::nn::Linear net(4, 3);
        DistributedDataParallel model(net, context);
        model(at::ones({2, 4})).sum().backward();
        const bool odd = context.rank() == last;
        model.set_non_finite_policy(odd == all_but_one ? one : other);
        const std::string text = error_of([&] { model(at::ones({2, 4})).sum().backward(); });
        const std::string mine = last == 1 ? "rank 0" : "ranks 0, 1", theirs = "rank " + std::to_string(last);
        EXPECT_EQ(text, std::string("set_non_finite_policy(): the ranks have different policies: ") + name_of(one) +
                            " on " + (all_but_one ? theirs : mine) + " and " + name_of(other) + " on " +
                            (all_but_one ? mine : theirs) + ". Every rank must set the same policy");
        model.set_non_finite_policy(kSkip);
        EXPECT_EQ(error_of([&] { model(at::ones({2, 4})).sum().backward(); }), "no error");
      }
  });
}

/// The optimizer is LibTorch's, which this library does not know.
TEST(WrongBackwards, AStepWhileGradientsOfAccumulateWaitIsToldOnAllRanks) {
  for (const bool on_all : {true, false})
    on_every_engine([&](Context& context) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      DistributedDataParallel model(net, context);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto accumulation = model.accumulate(2);
      const auto pass = [&] { model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward(); };
      for (int i = 0; i < 2; ++i) pass();
      optimizer.step();
      optimizer.zero_grad();
      pass();
      if (on_all || context.rank() == 1) optimizer.step();
      const std::string text = error_of(pass);
      EXPECT_IN(on_all ? "ranks 0" : "rank 1: parameter 0.weight", text);
      EXPECT_IN("was changed, as optimizer.step() does, while the gradients of 1 backward pass of accumulate() waited",
                text);
    });
}

/// The same at the end of a program: no backward follows that could report it.
TEST(WrongBackwards, AStepWhileGradientsOfAccumulateWaitAtTheEndIsWarnedOf) {
  on_every_engine([](Context& context) {
    const c10::WarningUtils::WarnAlways always;
    const auto warnings_of = [&](int passes, bool steps) {
      const testing::HeardWarnings heard;
      {
        torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
        DistributedDataParallel model(net, context);
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        const auto accumulation = model.accumulate(2);
        for (int i = 0; i < passes; ++i) model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward();
        if (steps) optimizer.step();
      }
      return heard.text();
    };
    EXPECT_IN("while the gradients of 1 backward pass of accumulate() waited in .grad", warnings_of(3, true));
    EXPECT_EQ(warnings_of(3, false), "");
    EXPECT_EQ(warnings_of(4, true), "");
  });
}

/// The optimizer steps by gradients of a pass within no_sync(), and zero_grad() removes them before any are reduced.
TEST(WrongBackwards, AStepByGradientsOfNoSyncIsToldOnAllRanks) {
  for (const bool on_all : {true, false})
    on_every_engine([&](Context& context) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      DistributedDataParallel model(net, context);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto pass = [&] { model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward(); };
      {
        const auto guard = model.no_sync();
        pass();
      }
      if (on_all || context.rank() == 1) optimizer.step();
      optimizer.zero_grad();
      const std::string text = error_of(pass);
      EXPECT_IN(on_all ? "ranks 0" : "rank 1: parameter 0.weight", text);
      EXPECT_IN("was changed, as optimizer.step() does, while the gradients of 1 backward pass within no_sync() waited",
                text);
    });
}

/// Two of these change the weights of all ranks alike: a critic's weights are clipped while gradients of the
/// generator's loss wait, and parameters that ranks have trained apart are averaged.
TEST(WrongBackwards, ReplicasThatAreEqualAfterNoSyncAreRight) {
  on_every_engine([](Context& context) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    DistributedDataParallel model(net, context);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto pass = [&] { model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward(); };
    const auto change = [&](const std::function<void(at::Tensor)>& parameter) {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& one : net->parameters()) parameter(one);
    };
    for (int step = 0; step < 4; ++step) {
      for (int local = 0; local < 1 + step % 2; ++local) {
        const auto guard = model.no_sync();
        pass();
        if (step < 2) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
      change([&](at::Tensor of) {
        if (step < 2)
          of.clamp_(-0.01, 0.01);
        else
          context.group().all_reduce(of.div_(context.world_size()));
      });
      optimizer.zero_grad();
      EXPECT_EQ(error_of(pass), "no error");
      optimizer.step();
    }
    model.check_divergence();
  });
}

/// The gradients of a second pass are reduced without a backward.
TEST(WrongBackwards, AStepBeforeReduceGradientsIsToldOnAllRanks) {
  for (const bool accumulates : {true, false})
    on_every_engine([&](Context& context) {
      torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
      DistributedDataParallel model(net, context);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      std::optional<NoSyncGuard> guard;
      if (accumulates)
        guard.emplace(model.accumulate(3));
      else
        guard.emplace(model.no_sync());
      model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward();
      if (context.rank() == 1) optimizer.step();
      EXPECT_IN("rank 1: parameter 0.weight was changed", error_of([&] { model.reduce_gradients(); }));
    });
}

/// Weights that all ranks clip alike between the passes of one step.
TEST(WrongBackwards, EqualReplicasWithinAccumulateAreRight) {
  on_every_engine([](Context& context) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    DistributedDataParallel model(net, context);
    const auto accumulation = model.accumulate(2);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(error_of([&] { model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward(); }), "no error");
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.clamp_(-0.1 / (i + 1), 0.1 / (i + 1));
    }
    model.check_divergence();
  });
}

/// An optimizer that steps after join() must not find gradients of this rank alone.
TEST(WrongBackwards, JoinLeavesNoGradientsOfItsOwn) {
  on_every_engine([](Context& context) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    DistributedDataParallel model(net, context);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    model.join([&] {
      const auto guard = model.no_sync();
      model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward();
    });
    EXPECT_FALSE(net->parameters().front().grad().defined());
    optimizer.step();
    model.check_divergence();
  });
}

/// No backward reduces, so no other rank can be told.
TEST(WrongBackwards, StepsWithinNoSyncAreWarnedOfOnce) {
  on_every_engine([](Context& context) {
    const c10::WarningUtils::WarnAlways always;
    for (const int steps : {0, 1, 5}) {
      const testing::HeardWarnings heard;
      {
        torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
        DistributedDataParallel model(net, context);
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        const auto local = model.no_sync();
        for (int step = 0; step < 6; ++step) {
          model(at::full({2, 4}, context.rank() + 1.0)).square().sum().backward();
          if (step < steps) optimizer.step();
          optimizer.zero_grad();
        }
      }
      const size_t first = heard.text().find("within no_sync() waited in .grad");
      EXPECT_EQ(first != std::string::npos, steps > 0) << heard.text();
      EXPECT_EQ(heard.text().find("within no_sync() waited in .grad", first + 1), std::string::npos) << heard.text();
    }
  });
}

/// A generator's loss that reaches the critic, without a word to the critic's replica.
TEST(WrongBackwards, ACriticReachedInPassingWithinAccumulateIsTold) {
  on_every_engine([](Context& context) {
    torch::nn::Sequential critic(torch::nn::Linear(4, 1)), generator(torch::nn::Linear(4, 4));
    DistributedDataParallel of_critic(critic, context), of_generator(generator, context);
    torch::optim::SGD optimizer(critic->parameters(), 0.1);
    const at::Tensor noise = at::full({2, 4}, context.rank() + 1.0);
    const std::string text = error_of([&] {
      for (int step = 0; step < 4; ++step) {
        const auto both = of_critic.accumulate(2);
        critic->zero_grad();
        for (int i = 0; i < 2; ++i) of_critic(noise + i).sum().backward();
        optimizer.step();
        of_critic(of_generator(noise)).square().sum().backward();
      }
    });
    EXPECT_IN("of accumulate() waited in .grad", text);
    EXPECT_IN("a backward that only passes through this model runs within no_sync()", text);
  });
}

/// The same program, right: what no_sync() holds back and zero_grad() throws away does not count.
TEST(WrongBackwards, PassesWithinNoSyncAreNoneOfAccumulate) {
  on_every_engine([](Context& context) {
    const auto train = [&](bool freezes) {
      torch::manual_seed(1);
      torch::nn::Sequential critic(torch::nn::Linear(4, 1)), generator(torch::nn::Linear(4, 4));
      DistributedDataParallel of_critic(critic, context), of_generator(generator, context);
      torch::optim::SGD optimizer(critic->parameters(), 0.1), of_noise(generator->parameters(), 0.1);
      const at::Tensor noise = at::full({2, 4}, context.rank() + 1.0);
      for (int step = 0; step < 4; ++step) {
        const auto both = of_critic.accumulate(2);
        critic->zero_grad();
        generator->zero_grad();
        for (int i = 0; i < 2; ++i) {
          EXPECT_EQ(both.complete(), i == 0 && (step == 0 || freezes));
          of_critic(of_generator(noise).detach() + i).sum().backward();
        }
        EXPECT_TRUE(both.complete());
        optimizer.step();
        std::optional<NoSyncGuard> local;
        if (!freezes) local.emplace(of_critic.no_sync());
        for (at::Tensor& parameter : critic->parameters()) parameter.requires_grad_(!freezes);
        of_critic(of_generator(noise)).square().sum().backward();
        of_noise.step();
        for (at::Tensor& parameter : critic->parameters()) parameter.requires_grad_(true);
      }
      of_critic.check_divergence();
      of_generator.check_divergence();
      std::vector<at::Tensor> trained = critic->parameters(), more = generator->parameters();
      trained.insert(trained.end(), more.begin(), more.end());
      for (at::Tensor& parameter : trained) parameter = parameter.detach().clone().view(-1);
      return at::cat(trained);
    };
    EXPECT_TRUE(at::equal(train(false), train(true)));
  });
}

}  // namespace
}  // namespace lockstep::wrong_backwards_test
