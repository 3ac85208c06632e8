#include <cstdlib>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <lockstep/group.h>
#include <torch/torch.h>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "support/ranks.h"

// Ranks that leave a subgroup: what the others are told, and what becomes of operations that nobody waited for.

namespace lockstep::leaving_test {
namespace {

using std::chrono::seconds;
using testing::Engine;
using testing::run_ranks;

class Leaving : public ::testing::TestWithParam<Engine> {
 protected:
  static void run(const std::function<void(Context&)>& body) {
    run_ranks(GetParam().world_size, body, seconds(50),
              {.collective_timeout = seconds(45), .backend = GetParam().backend, .announce = false},
              GetParam().machines);
  }
};
const Engine kEngines[] = {
    {2, "gloo"}, {3, "gloo"}, {2, "shm"}, {3, "shm"}, {3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Engines, Leaving, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return testing::name_of(instance.param); });

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in: " << text;
}

/// What the program writes to stderr meanwhile.
std::string said_by(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

// The others had "Connection closed by peer", since a destroyed engine left no word.
TEST_P(Leaving, ASubgroupIsNamed) {
  run([](Context& context) {
    std::optional<Group> group = context.group().split(0);
    group->barrier();
    if (context.rank() == 0)
      group.reset();
    else {
      const std::string text = error_of([&] { group->all_reduce(at::ones({7})); });
      expect_in("rank 0 has already left the group, but rank ", text);
      expect_in("called operation 2, all_reduce(float32, 7 elements, sum)", text);
      EXPECT_EQ(text.find("Connection"), std::string::npos) << text;
    }
    context.group().barrier();
  });
}

TEST_P(Leaving, ByExitIsNamed) {
  run([](Context& context) {
    const Group group = context.group().split(0);
    if (context.rank() == 1) std::exit(0);
    const std::string text = error_of([&] { group.barrier(); });
    expect_in(GetParam().backend == "shm" ? "rank 1 (pid " : "rank 1 has already left the group, but rank ", text);
    EXPECT_EQ(text.find("Connection"), std::string::npos) << text;
  });
}

TEST_P(Leaving, ASubgroupWithoutReceivingIsNamed) {
  run([](Context& context) {
    std::optional<Group> group = context.group().split(0);
    if (context.rank() == 0) group.reset();
    if (context.rank() == 1) {
      const std::string text = error_of([&] { group->recv(at::ones({4}), 0, 3); });
      expect_in("rank 0 has already left the group, but rank 1 called a recv from rank 0 with tag 3", text);
      EXPECT_EQ(text.find("Connection"), std::string::npos) << text;
    }
    context.group().barrier();
  });
}

// Over Gloo the other groups went on, in shared memory not.
TEST_P(Leaving, TheWrongOrderOfGroupsEndsAllGroups) {
  run([](Context& context) {
    const Group first = context.group().split(0), second = context.group().split(0);
    const std::string text = error_of([&] { (context.rank() == 0 ? first : second).barrier(); });
    expect_in("wait for each other, so none can go on", text);
    expect_in("wait for each other, so none can go on", error_of([&] { context.group().all_reduce(at::ones({4})); }));
  });
}

// Over Gloo the ranks hung in the destructor of the group; in shared memory nobody was told.
TEST_P(Leaving, ASubgroupWithCallsThatDoNotMatchIsToldOnEveryRank) {
  run([](Context& context) {
    std::optional<Group> group = context.group().split(0);
    if (context.rank() == 0)
      static_cast<void>(group->all_reduce_async(at::ones({4})));
    else
      static_cast<void>(group->barrier_async());
    context.group().barrier();
    const auto started = Clock::now();
    const std::string text = said_by([&] { group.reset(); });
    EXPECT_LT(seconds_since(started), 8);
    expect_in("never waited for an operation", text);
    expect_in("ranks disagree on operation 1", text);
    expect_in("all_reduce(float32, 4 elements, sum)", text);
    expect_in("Call wait() on every Work", text);
    EXPECT_TRUE(has_unfinished_operations());
    context.group().barrier();
  });
}

TEST_P(Leaving, ASubgroupThatOneRankAloneCalledIsToldThere) {
  run([](Context& context) {
    std::optional<Group> group = context.group().split(0);
    if (context.rank() == 0) static_cast<void>(group->all_reduce_async(at::ones({4})));
    context.group().barrier();
    const auto started = Clock::now();
    const std::string text = said_by([&] { group.reset(); });
    EXPECT_LT(seconds_since(started), 8);
    if (context.rank() == 0)
      expect_in("has already left the group, but rank 0 called operation 1, all_reduce(float32, 4 elements, sum)",
                text);
    else
      EXPECT_EQ(text.find("never waited"), std::string::npos) << text;
    EXPECT_EQ(has_unfinished_operations(), context.rank() == 0);
    context.group().barrier();
  });
}

TEST_P(Leaving, ASubgroupEndsWhatNobodyWaitsFor) {
  run([](Context& context) {
    std::optional<Group> group = context.group().split(0);
    const at::Tensor sum = at::ones({1 << 20});
    if (context.rank() == 0)
      static_cast<void>(group->all_reduce_async(sum));
    else {
      std::this_thread::sleep_for(seconds(1));
      group->all_reduce(sum);
    }
    EXPECT_EQ(said_by([&] { group.reset(); }), "");
    EXPECT_EQ(sum[5].item<float>(), static_cast<float>(context.world_size()));
    EXPECT_FALSE(has_unfinished_operations());
    context.group().barrier();
  });
}

}  // namespace
}  // namespace lockstep::leaving_test
