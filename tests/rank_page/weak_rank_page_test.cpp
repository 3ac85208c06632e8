#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "collectives/shm/weak_executions.h"
#include "rank_page/rank_page.h"

// A rank writes its page while the launcher reads it, on memory that is as weak as ARM's or weaker: what is read
// belongs together. collectives/shm/weak_memory.h says what the model allows.

namespace lockstep {
namespace {

using shm::Dropped;
using What = shm::Dropped::What;

constexpr int kOperations = 4;
constexpr const char* kKinds[] = {"all_reduce", "broadcast"};
constexpr const char* kWhy = "a text of more than one word";

void write(RankPage& page) {
  for (uint64_t sequence = 1; sequence <= kOperations; ++sequence) {
    const auto elements = static_cast<int64_t>(1000 * sequence);
    page.start_operation(sequence, kKinds[sequence % 2], "Float", elements, &elements, 1, Clock::time_point());
  }
  page.fail(RankFailure::kOwn, -1, kWhy);
}

/// Empty if what was read belongs together.
std::string difference(const RankStatus& status) {
  const auto& operation = status.operation;
  if (status.failure == RankFailure::kOwn && status.failure_text != kWhy) return "a failure without its text";
  if (operation.sequence == 0) return "";
  const auto elements = static_cast<int64_t>(1000 * operation.sequence);
  if (operation.kind != kKinds[operation.sequence % 2]) return "the kind of another operation";
  if (operation.elements != elements || operation.shape != std::vector<int64_t>{elements})
    return "the size of another operation";
  return "";
}

shm::WeakOutcome explore(int executions, const Dropped& dropped) {
  const auto page = std::make_unique<RankPage>();
  shm::WeakMemory memory(2, [](size_t, size_t) { return std::string("a word"); });
  memory.track(reinterpret_cast<std::byte*>(page.get()), sizeof *page);
  const auto body = [&](int rank, std::string& wrong) {
    if (rank == 0) return write(*page);
    for (int i = 0; i < kOperations; ++i)
      if (wrong.empty()) wrong = difference(page->read(2));
  };
  return shm::explore(
      memory, 2, executions, dropped, [&] { new (page.get()) RankPage(); }, body);
}

TEST(WeakRankPage, WhatIsReadBelongsTogether) {
  const int executions = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 50'000 : 1000;
  const shm::WeakOutcome outcome = explore(executions, {});
  EXPECT_EQ(outcome.wrong, "") << "in the execution with seed " << outcome.executions - 1;
  EXPECT_GT(outcome.stale_loads, 0u);
}

class WeakRankPageOmissions : public ::testing::TestWithParam<Dropped> {};

TEST_P(WeakRankPageOmissions, AreFound) {
  const shm::WeakOutcome outcome = explore(2000, GetParam());
  EXPECT_NE(outcome.wrong, "") << "in " << outcome.executions << " executions";
  std::printf("found in execution %d: %s\n", outcome.executions, outcome.wrong.c_str());
}

INSTANTIATE_TEST_SUITE_P(Orders, WeakRankPageOmissions,
                         ::testing::Values(Dropped{"a word", What::kRelease}, Dropped{"a word", What::kAcquire},
                                           Dropped{"", What::kReleaseFences}, Dropped{"", What::kAcquireFences}),
                         [](const auto& one) {
                           return std::string(one.param.what == What::kRelease         ? "Releases"
                                              : one.param.what == What::kAcquire       ? "Acquires"
                                              : one.param.what == What::kReleaseFences ? "ReleaseFence"
                                                                                       : "AcquireFence");
                         });

}  // namespace
}  // namespace lockstep
