// Ranks that wait for each other in different groups are told who waits where; ranks that are late are waited for.

#include "collectives/groups_watch.h"

#include <future>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>
#include <torch/nn/modules/linear.h>

#include "support/deadlock.h"

namespace lockstep::groups_watch_test {
namespace {

using namespace testing;  // NOLINT

class GroupsWatchOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Engines, GroupsWatchOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

std::string all_ranks(const Engine& engine) {
  return engine.world_size == 2 ? "ranks 0, 1" : "ranks 0-" + std::to_string(engine.world_size - 1);
}

void sum(const Group& group) { group.all_reduce(at::ones({4})); }

TEST_P(GroupsWatchOn, CollectivesOfTwoGroupsInAnotherOrder) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& all = context.group();
    const Group same = all.split(0);
    sum(all), sum(same);
    const bool odd = context.rank() == 1;
    const std::string said = told_of_deadlock([&] { sum(odd ? same : all); }, "rank " + std::to_string(context.rank()));
    const std::string members = " (" + all_ranks({context.world_size(), ""}) + ")";
    EXPECT_NE(said.find("rank 1 in all_reduce #1 in subgroup 0" + members), std::string::npos) << said;
    EXPECT_NE(said.find(" in the group of all ranks"), std::string::npos) << said;
  });
}

TEST_P(GroupsWatchOn, OneRankInASubgroupAndTheRestInTheGroupOfAll) {
  run_ranks(GetParam(), [](Context& context) {
    const auto pair = context.group().subgroup({0, 1});
    told_of_deadlock(
        [&] {
          if (context.rank() == 0)
            (void)pair->mean(1);
          else
            context.group().barrier();
        },
        "rank " + std::to_string(context.rank()));
  });
}

TEST_P(GroupsWatchOn, AMessageInOneGroupAndACollectiveOfAnother) {
  for (const bool is_send : {false, true})
    run_ranks(GetParam(), [is_send](Context& context) {
      const auto pair = context.group().subgroup({0, 1});
      if (pair) {  // messages that match
        const at::Tensor word = at::ones({1});
        for (int i = 0; i < 3; ++i) pair->rank() == 0 ? pair->send(word, 1, 7) : pair->recv(word, 0, 7);
      }
      context.group().barrier();
      const at::Tensor large = at::ones({8 << 20});  // more than lies anywhere until it is received
      const std::string said = told_of_deadlock(
          [&] {
            if (context.rank() != 0) return context.group().barrier();
            is_send ? pair->send(large, 1, 7) : pair->recv(large, 1, 7);
          },
          "rank " + std::to_string(context.rank()));
      const std::string waits = is_send ? "rank 0 waiting until rank 1 receives a message with tag 7 in subgroup 0"
                                        : "rank 0 waiting for a message from rank 1 with tag 7 in subgroup 0";
      EXPECT_NE(said.find(waits), std::string::npos) << said;
    });
}

TEST_P(GroupsWatchOn, AReplicaInASubgroupWhileAnotherRankWaitsInTheGroupOfAll) {
  run_ranks(GetParam(), [](Context& context) {
    const auto pair = context.group().subgroup({0, 1});
    std::optional<DistributedDataParallel<torch::nn::Linear>> model;
    if (pair) model.emplace(torch::nn::Linear(3, 2), *pair);
    context.group().barrier();
    const std::string said = told_of_deadlock(
        [&] {
          if (context.rank() != 0) return (void)context.group().mean(1);
          (*model)(at::ones({4, 3})).sum().backward();
        },
        "rank " + std::to_string(context.rank()));
    EXPECT_NE(said.find("rank 0 in all_reduce #"), std::string::npos) << said;
  });
}

/// Rank r begins with the group of itself and the next rank.
TEST(GroupsWatch, ARingOfThree) {
  for (const char* engine : {"shm", "gloo"})
    run_ranks({3, engine}, [](Context& context) {
      std::optional<Group> pairs[3];
      for (int first = 0; first < 3; ++first) pairs[first] = context.group().subgroup({first, (first + 1) % 3});
      told_of_deadlock([&] { sum(*pairs[context.rank()]); }, "rank " + std::to_string(context.rank()));
    });
}

/// A thread that has called groups no longer can: it has ended, or waits for the one that waits for another rank.
TEST_P(GroupsWatchOn, AfterAnotherThreadHasCalledGroups) {
  for (const bool ends : {true, false})
    run_ranks(GetParam(), [ends](Context& context) {
      const Group a = context.group().split(0), b = context.group().split(0), own = context.group().split(0);
      std::promise<void> asked;
      std::thread helper([&] {
        sum(own);
        if (!ends) asked.get_future().wait();
      });
      if (ends) helper.join();
      told_of_deadlock([&] { sum(context.rank() == 0 ? a : b); }, "rank " + std::to_string(context.rank()));
      asked.set_value();
      if (!ends) helper.join();
    });
}

TEST_P(GroupsWatchOn, ManyGroups) {
  run_ranks(GetParam(), [](Context& context) {
    std::vector<Group> groups;
    for (int i = 0; i < 40; ++i) groups.push_back(context.group().split(0));
    const std::string said =
        told_of_deadlock([&] { sum(groups[context.rank() == 0 ? 38 : 39]); }, "rank " + std::to_string(context.rank()));
    EXPECT_NE(said.find("rank 0 in all_reduce #0 in subgroup 38 ("), std::string::npos) << said;
  });
}

TEST(GroupsWatch, TheRestGoesOn) {
  run_ranks({4, "shm"}, [](Context& context) {
    const auto first = context.group().subgroup({0, 1}), same = context.group().subgroup({0, 1}),
               rest = context.group().subgroup({2, 3});
    if (first) {
      told_of_deadlock([&] { sum(context.rank() == 0 ? *first : *same); }, "rank " + std::to_string(context.rank()));
      return;
    }
    for (const auto start = Clock::now(); rest->mean(seconds_since(start)) < 6;)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
}

/// Waits of all kinds, in three groups.
void use_all(Context& context, const Group& same, const std::optional<Group>& pair) {
  sum(context.group());
  const at::Tensor word = at::ones({1 << 10});
  const int rank = same.rank(), next = (rank + 1) % same.world_size(),
            last = (rank + same.world_size() - 1) % same.world_size();
  const Work sent = same.send_async(word, next, 3);
  same.recv(at::empty_like(word), last, 3);
  sent.wait();
  if (pair) sum(*pair);
  sum(same);
}

TEST_P(GroupsWatchOn, AStoppedRankIsWaitedFor) {
  run_ranks(GetParam(), [](Context& context) {
    const Group same = context.group().split(0);
    const auto pair = context.group().subgroup({0, 1});
    std::optional<StoppedNowAndThen> stopped;
    if (context.rank() == 1) stopped.emplace(2, std::chrono::milliseconds(300), std::chrono::milliseconds(3000));
    const auto start = Clock::now();
    for (bool goes_on = true; goes_on;
         goes_on = context.group().broadcast_bytes(seconds_since(start) < 7 ? "1" : "0", 1) == "1")
      for (int i = 0; i < 20; ++i) use_all(context, same, pair);
  });
}

TEST_P(GroupsWatchOn, ARankThatComputesIsWaitedFor) {
  run_ranks(GetParam(), [](Context& context) {
    const Group same = context.group().split(0);
    const auto pair = context.group().subgroup({0, 1});
    if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    use_all(context, same, pair);
  });
}

/// Each rank starts one collective and waits for the other one first.
TEST_P(GroupsWatchOn, CollectivesThatAreUnderWayAreNoCycle) {
  run_ranks(GetParam(), [](Context& context) {
    const Group a = context.group().split(0), b = context.group().split(0);
    if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3500));
    const at::Tensor one = at::ones({4});
    const Work started = (context.rank() == 0 ? a : b).all_reduce_async(one);
    sum(context.rank() == 0 ? b : a);
    started.wait();
  });
}

/// Two threads with a group each. On each rank another one of them is late.
TEST_P(GroupsWatchOn, ThreadsWithGroupsOfTheirOwnAreNoCycle) {
  run_ranks(GetParam(), [](Context& context) {
    const Group a = context.group().split(0), b = context.group().split(0);
    const auto use = [&](const Group& group, bool late) {
      sum(group);
      if (late) std::this_thread::sleep_for(std::chrono::milliseconds(5000));
      sum(group);
    };
    std::thread second([&] { use(b, context.rank() == 0); });
    use(a, context.rank() != 0);
    second.join();
  });
}

}  // namespace
}  // namespace lockstep::groups_watch_test
