#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include <torch/torch.h>

#include <lockstep/context.h>

#include "base/clock.h"
#include "support/ranks.h"

// Works that are only asked whether they are done.

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLimit{800};

class PolledWork : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(On, PolledWork,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"},
                                           Engine{3, "hierarchical", "aab"}),
                         [](const auto& engine) { return name_of(engine.param); });

/// The Error of the first poll that throws one.
std::string polled(const Work& work) {
  const auto start = Clock::now();
  try {
    while (!work.is_completed() && seconds_since(start) < 20) std::this_thread::sleep_for(milliseconds(2));
  } catch (const Error& error) {
    return error.what();
  }
  return "no error after " + std::to_string(seconds_since(start)) + " s";
}

std::string waited(const Work& work) {
  try {
    work.wait();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// `named`: what its error begins with.
void expect_time_out(const Work& work, const std::string& named) {
  const auto start = Clock::now();
  EXPECT_FALSE(work.is_completed());
  const std::string error = polled(work);
  EXPECT_GT(seconds_since(start), 0.6);
  EXPECT_LT(seconds_since(start), 2);
  EXPECT_EQ(error.find(named), 0u) << error;
  EXPECT_EQ(waited(work), error) << "wait() throws the same";
  EXPECT_EQ(polled(work), error) << "and so does every poll";
}

/// Such a program polled for ever.
TEST_P(PolledWork, ThrowsAfterTheTimeLimit) {
  const Engine& engine = GetParam();
  run_ranks(
      engine.world_size,
      [](Context& context) {
        const Group first = context.group().split(0), second = context.group().split(0);
        const at::Tensor data = at::ones({4});
        if (context.rank() == 0) {
          expect_time_out(first.all_reduce_async(data), "all_reduce #");
          expect_time_out(second.recv_async(data, context.world_size() - 1, 7), "recv #");
        } else {
          std::this_thread::sleep_for(milliseconds(4500));
        }
      },
      std::chrono::seconds(60), {.collective_timeout = kLimit, .backend = engine.backend, .announce = false},
      engine.machines);
}

TEST_P(PolledWork, IsDoneBeforeTheTimeLimit) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    for (const int64_t size : {int64_t{4}, int64_t{300'000}}) {
      const at::Tensor data = at::full({size}, context.rank() + 1, at::kFloat);
      const at::Tensor columns = at::ones({3, size}).t();  // its result is copied back
      const Work work = group.all_reduce_async(data), other = group.all_reduce_async(columns);
      const auto start = Clock::now();
      while ((!work.is_completed() || !other.is_completed()) && seconds_since(start) < 20)
        std::this_thread::sleep_for(milliseconds(1));
      work.wait(), other.wait();
      const int n = context.world_size();
      EXPECT_TRUE(data.eq(n * (n + 1) / 2).all().item<bool>());
      EXPECT_TRUE(columns.eq(n).all().item<bool>());
    }
  });
}

}  // namespace
}  // namespace lockstep::testing
