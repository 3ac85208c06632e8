#include <gtest/gtest.h>
#include <lockstep/group.h>

#include <thread>

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/clock.h"
#include "collectives/gloo/flight_recorder.h"
#include "support/ranks.h"

// Collectives over Gloo that do not match, and ranks that do not come: who is named, and when.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::run_ranks;

struct Pair {
  std::string name, first, second;  ///< what the last rank calls, and what the others call
  std::function<void(const Group&, const at::Tensor&)> odd, rest;
};

const std::vector<Pair>& pairs() {
  static const std::vector<Pair> kPairs{
      {"sizes", "all_reduce(float32, 99 elements, sum)", "all_reduce(float32, 100 elements, sum)",
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data.narrow(0, 0, 99)); },
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data); }},
      {"dtypes", "all_reduce(int32, 100 elements, sum)", "all_reduce(float32, 100 elements, sum)",
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data.to(at::kInt)); },
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data); }},
      {"reductions", "all_reduce(float32, 100 elements, max)", "all_reduce(float32, 100 elements, mean)",
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data, ReduceOp::kMax); },
       [](const Group& group, const at::Tensor& data) { group.all_reduce(data, ReduceOp::kMean); }},
      {"roots", "broadcast(float32, 100 elements, root 1)", "broadcast(float32, 100 elements, root 0)",
       [](const Group& group, const at::Tensor& data) { group.broadcast(data, 1), group.barrier(); },
       [](const Group& group, const at::Tensor& data) { group.broadcast(data, 0), group.barrier(); }},
      {"operations", "barrier()", "reduce_scatter(float32, 50 elements, sum)",
       [](const Group& group, const at::Tensor&) { group.barrier(); },
       [](const Group& group, const at::Tensor& data) {
         (void)group.reduce_scatter(data.narrow(0, 0, 50).expand({group.world_size(), 50}).contiguous());
       }},
      {"one_of_several", "all_gather(float32, 100 elements)", "all_reduce(float32, 100 elements, sum)",
       [](const Group& group, const at::Tensor& data) {
         const Work one = group.all_reduce_async(data.clone()), two = group.all_reduce_async(data.clone());
         (void)group.all_gather(data);
         one.wait(), two.wait();
       },
       [](const Group& group, const at::Tensor& data) {
         const Work one = group.all_reduce_async(data.clone()), two = group.all_reduce_async(data.clone()),
                    three = group.all_reduce_async(data);
         one.wait(), two.wait(), three.wait();
       }},
  };
  return kPairs;
}

struct Case {
  Pair pair;
  int ranks;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.pair.name; }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Pair& pair : pairs())
    for (int ranks : {2, 3}) cases.push_back({pair, ranks});
  return cases;
}

class GlooMismatch : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Calls, GlooMismatch, ::testing::ValuesIn(all_cases()), [](const auto& instance) {
  return instance.param.pair.name + "_" + std::to_string(instance.param.ranks);
});

TEST_P(GlooMismatch, NamesBothSidesLongBeforeTheTimeout) {
  const auto& [pair, ranks] = GetParam();
  const auto body = [&pair, ranks](Context& context) {
    const bool odd = context.rank() == ranks - 1;
    const at::Tensor data = at::full({100}, context.rank() + 1.0f), before = data.clone();
    context.group().barrier();
    const auto start = Clock::now();
    std::string text = "no error";
    try {
      (odd ? pair.odd : pair.rest)(context.group(), data);
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_LT(seconds_since(start), 2);
    const std::string last = "rank " + std::to_string(ranks - 1), rest = ranks == 2 ? "rank 0" : "ranks 0, 1";
    for (const std::string& part :
         {std::string("ranks disagree on operation "), last + " called " + pair.first, rest + " called " + pair.second})
      EXPECT_NE(text.find(part), std::string::npos) << text << "\nhas no\n" << part;
    // Of three ranks, the two that agree may have exchanged parts.
    EXPECT_TRUE(ranks == 3 || at::equal(data, before));
  };
  run_ranks(ranks, body, seconds(30), {.collective_timeout = seconds(25), .backend = "gloo", .announce = false});
}

TEST(GlooCalls, ARankThatIsLateIsNoError) {
  const auto body = [](Context& context) {
    // What a rank reported while it waited for the other must not be taken for a later call.
    for (int turn = 0; turn < 3; ++turn) {
      if (context.rank() == turn % 2) std::this_thread::sleep_for(milliseconds(1300));
      const at::Tensor sum = at::ones({4 + turn});
      context.group().all_reduce(sum);
      EXPECT_EQ(sum[3].item<float>(), context.world_size());
      context.group().broadcast(sum, turn % 2);
      context.group().barrier();
    }
  };
  run_ranks(3, body, seconds(30), {.collective_timeout = seconds(20), .backend = "gloo", .announce = false});
}

TEST(GlooCalls, AFailureSaysWhereEveryRankIs) {
  const auto body = [](Context& context) {
    const auto failure = [&] {
      try {
        context.group().all_reduce(at::ones({7}));
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    context.group().barrier();
    if (context.rank() == 1) std::this_thread::sleep_for(milliseconds(2500));
    const std::string text = failure();
    const bool late = context.rank() == 1;
    const std::vector<std::string> parts{
        late ? "where the ranks are: ranks 0-2 failed in operation " : "where the ranks are: ranks 0, 2 failed in ",
        "all_reduce(float32, 7 elements, sum)",
        late ? "" : "; rank 1 reported nothing: it has ended or is doing something else"};
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\nhas no " << part;
  };
  run_ranks(3, body, seconds(30), {.collective_timeout = seconds(1), .backend = "gloo", .announce = false});
}

TEST(GlooCalls, ARankThatHasLeftIsNamed) {
  for (const int ranks : {2, 3}) {
    const auto body = [ranks](Context& context) {
      context.group().barrier();
      if (context.rank() == ranks - 1) return;  // and its Context is destroyed
      const auto start = Clock::now();
      std::string text = "no error";
      try {
        context.group().all_reduce(at::ones({7}));
      } catch (const Error& error) {
        text = error.what();
      }
      EXPECT_LT(seconds_since(start), 5);
      const std::string me = std::to_string(context.rank()), last = std::to_string(ranks - 1);
      EXPECT_NE(text.find("rank " + last + " has already left the group, but rank " + me +
                          " called operation 2, all_reduce(float32, 7 elements, sum); the last operation it started "
                          "was operation 1, barrier(). All ranks must call the same operations."),
                std::string::npos)
          << text;
      EXPECT_EQ(text.find("Connection closed"), std::string::npos) << text;
    };
    run_ranks(ranks, body, seconds(30), {.collective_timeout = seconds(25), .backend = "gloo", .announce = false});
  }
}

/// A store whose server ends after some reports, as it does when it was a rank that has failed.
class EndingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& data) override {
    if (reports_left == 0) throw std::runtime_error("the server has ended");
    --reports_left;
    c10d::HashStore::set(key, data);
  }
  int reports_left = 3;
};

TEST(GlooCalls, WhatOthersHaveReportedIsKnownWhenTheStoreIsGone) {
  const auto store = c10::make_intrusive<EndingStore>();
  gloo_engine::FlightRecorder zero(store, 0, 3), one(store, 1, 3);
  one.after_failure(one.add("barrier"), milliseconds(0));  // its report is the first of three
  const auto began = Clock::now();
  EXPECT_EQ(zero.after_failure(zero.add("barrier"), seconds(20)),
            "where the ranks are: ranks 0, 1 failed in operation 1, barrier; rank 2 reported nothing: it has ended or "
            "is doing something else");
  EXPECT_LT(Clock::now() - began, seconds(10)) << "nobody can report to a store that is gone";
}

}  // namespace
}  // namespace lockstep
