#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/reference.h"
#include "rank_page/operation_label.h"
#include "support/without_core.h"

namespace {
thread_local int allocations_left = -1;  // of this thread, before one fails; -1: all succeed
}

[[gnu::noinline]] void* operator new(size_t bytes) {  // inlined, the pair would look mismatched to the compiler
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// What must happen when ranks disagree, stay away or leave: every rank fails soon, with a text that names them.
namespace lockstep::shm {
namespace {

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_IN(part, text) EXPECT_NE((text).find(part), std::string::npos) << text

Request floats(OperationKind kind, size_t count, std::vector<float>& memory) {
  return {.kind = kind, .type = DataType::kFloat32, .count = count, .input = memory.data(), .output = memory.data()};
}

class Disagreement : public ::testing::TestWithParam<int> {};

TEST_P(Disagreement, IsToldOnEveryRankNamingBothSides) {
  const int odd = GetParam() - 1;
  struct Pair {
    Request usual, odd;
    std::string a, b;
  };
  std::vector<float> memory(1 << 20);
  const Request usual = floats(OperationKind::kAllReduce, 1024, memory);
  std::vector<Pair> pairs;
  Request other = usual;
  other.count = 1025;
  pairs.push_back({usual, other, "all_reduce(float32, 1024 elements, sum)", "all_reduce(float32, 1025 elements, sum)"});
  other = usual;
  other.type = DataType::kInt32;
  pairs.push_back({usual, other, "all_reduce(float32,", "all_reduce(int32,"});
  other = usual;
  other.op = ReduceOp::kMax;
  pairs.push_back({usual, other, "1024 elements, sum)", "1024 elements, max)"});
  pairs.push_back({usual, floats(OperationKind::kBroadcast, 1024, memory), "all_reduce(",
                   "broadcast(float32, 1024 elements, root 0)"});
  other = floats(OperationKind::kBroadcast, 4, memory);
  Request root = other;
  root.root = 1;
  pairs.push_back({other, root, "root 0)", "root 1)"});
  pairs.push_back(
      {{.kind = OperationKind::kBarrier}, floats(OperationKind::kAllReduce, 1, memory), "barrier()", "all_reduce("});
  for (const Pair& pair : pairs) {
    with_group(GetParam(), [&](Communicator& group) {
      const OperationLabel label(group.rank() == odd ? "bucket 1 of 2" : "main_first()");
      const OperationLabel none(&pair == &pairs.front() ? "" : OperationLabel::current());
      group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
      std::vector<float> mine(2048, 5);
      Request request = group.rank() == odd ? pair.odd : pair.usual;
      request.input = request.output = mine.data();
      const auto start = Clock::now();
      const std::string text = error_of([&] { group.run(Request(request), kTestTimeout); });
      EXPECT_LT(seconds_since(start), 1);
      EXPECT_IN("ranks disagree on operation 2", text);
      EXPECT_IN("rank " + std::to_string(odd) + " called", text);
      EXPECT_IN(pair.a, text);
      EXPECT_IN(pair.b, text);
      if (&pair != &pairs.front()) {
        EXPECT_IN(") of bucket 1 of 2", text);
        EXPECT_IN(") of main_first()", text);
        EXPECT_IN("order. Where one rank calls main_first(), every rank must, in the same order.", text);
      } else {
        EXPECT_EQ(text.find(" of main_first()"), std::string::npos) << text;
      }
      for (float x : mine) ASSERT_EQ(x, 5) << "data moved";
      // Later operations fail with the same text.
      EXPECT_EQ(error_of([&] { group.run({.kind = OperationKind::kBarrier}, kTestTimeout); }), text);
    });
  }
}

TEST_P(Disagreement, OfSplitsNamesTheCounts) {
  const int n = GetParam();
  with_group(n, [&](Communicator& group) {
    std::vector<float> in(100, 1), out(100, 5);
    Request request{
        .kind = OperationKind::kAllToAllUneven, .type = DataType::kFloat32, .input = in.data(), .output = out.data()};
    request.make_pieces().send_counts.assign(static_cast<size_t>(n), 2);
    request.make_pieces().receive_counts.assign(static_cast<size_t>(n), 2);
    if (group.rank() == 0) request.make_pieces().send_counts[1] = 3;
    const std::string text = error_of([&] { group.run(Request(request), kTestTimeout); });
    EXPECT_IN("rank 0 sends 3 elements to rank 1, which expects 2", text);
    for (float x : out) ASSERT_EQ(x, 5) << "data moved";
  });
}

TEST_P(Disagreement, AMissingRankIsNamedWhenTimeIsUp) {
  const int n = GetParam(), missing = n - 1;
  std::atomic<int> failed{0};
  with_group(n, [&](Communicator& group) {
    if (group.rank() == missing) {
      while (failed.load() < n - 1) std::this_thread::yield();
      return;
    }
    const auto start = Clock::now();
    const double before = testing::seconds_without_core("thread-self");
    const std::string text =
        error_of([&] { group.run({.kind = OperationKind::kBarrier}, std::chrono::milliseconds(200)); });
    const double taken = seconds_since(start), waited = testing::seconds_without_core("thread-self") - before;
    failed.fetch_add(1);
    EXPECT_GT(taken, 0.15);
    EXPECT_LT(taken - waited, 1);
    EXPECT_IN("barrier()", text);
    EXPECT_IN("missing rank " + std::to_string(missing), text);
  });
}

TEST_P(Disagreement, ARankThatLeftIsNamed) {
  const int n = GetParam(), left = n - 1;
  with_group(n, [&](Communicator& group) {
    group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
    if (group.rank() == left) return;
    std::vector<float> x(100);
    const auto start = Clock::now();
    const std::string text = error_of([&] { group.run(floats(OperationKind::kAllReduce, 100, x), kTestTimeout); });
    EXPECT_LT(seconds_since(start), 1);
    EXPECT_IN("rank " + std::to_string(left) + " has already left the group", text);
    EXPECT_IN("all_reduce(float32, 100 elements, sum)", text);
    EXPECT_IN("operation 1, barrier()", text);
  });
}

TEST_P(Disagreement, AbortEndsEveryWait) {
  with_group(GetParam(), [&](Communicator& group) {
    if (group.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      group.abort("the loss is not a number");
    }
    const auto start = Clock::now();
    const std::string text = error_of([&] { group.run({.kind = OperationKind::kBarrier}, kTestTimeout); });
    EXPECT_LT(seconds_since(start), 1);
    EXPECT_IN("rank 0 aborted the group: the loss is not a number", text);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Disagreement, ::testing::Values(2, 3, 4));

TEST(Failure, AllMissingRanksAreNamedAtOnce) {
  std::atomic<bool> over{false};
  with_group(4, [&](Communicator& group) {
    if (group.rank() != 2) {
      while (!over.load()) std::this_thread::yield();
      return;
    }
    const std::string text =
        error_of([&] { group.run({.kind = OperationKind::kBarrier}, std::chrono::milliseconds(50)); });
    over.store(true);
    EXPECT_IN("missing ranks 0, 1, 3", text);
  });
}

/// Overwrites the stack that a caught exception has freed.
__attribute__((noinline)) void use_the_stack() {
  volatile char bytes[4096];
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<char>(0xa5);
}

// run() queues an object on its stack: when it runs out of memory, the exception must remove the object from the queue,
// and the other ranks, which cannot go on without this one, must be told.
TEST_P(Disagreement, MemoryThatIsLackingInRunEndsTheGroupAndLeavesNothingQueued) {
  const int n = GetParam();
  bool has_failed = true;
  for (int allocations = 0; has_failed; ++allocations) {
    std::atomic<bool> failed{false};
    with_group(n, [&](Communicator& group) {
      std::vector<float> x(200'000, 1), y(200'000);  // through chunks, whose state is allocated
      Request request = floats(OperationKind::kAllReduce, x.size(), x);
      request.output = y.data();
      const auto start = Clock::now();
      if (group.rank() == 0) {
        allocations_left = allocations;
        try {
          group.run(Request(request), kTestTimeout);
        } catch (const std::bad_alloc&) {
          failed = true;
        }
        allocations_left = -1;
        use_the_stack();
        if (!failed) return;
        EXPECT_FALSE(group.progress());
        const std::string text = error_of([&] { group.run(Request(request), kTestTimeout); });
        EXPECT_IN("rank 0 aborted the group: operation 1 could not continue: std::bad_alloc", text);
      } else {
        const std::string text = error_of([&] { group.run(Request(request), kTestTimeout); });
        if (text != "no error") {
          EXPECT_IN("rank 0 aborted the group: operation 1 could not continue: std::bad_alloc", text);
        }
      }
      EXPECT_LT(seconds_since(start), 5);
    });
    has_failed = failed;
    EXPECT_TRUE(has_failed || allocations > 0) << "nothing was allocated";
  }
}

TEST(Failure, WhatWasPublishedBeforeLeavingStillCounts) {
  with_group(3, [](Communicator& group) {
    std::vector<float> x(1000, static_cast<float>(group.rank()));
    auto work = group.start(floats(OperationKind::kBroadcast, 1000, x));
    if (group.rank() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    group.wait(*work, kTestTimeout);
    EXPECT_EQ(x[999], 0);
  });
}

TEST(Failure, OnlyAnOperationThatNobodyWaitedForIsUnfinished) {
  for (const bool waits : {true, false})
    with_group(2, [waits](Communicator& group) {
      std::vector<float> x(10);
      Request request = floats(OperationKind::kBroadcast, 10, x);
      request.root = group.rank();
      if (waits)
        EXPECT_IN("ranks disagree", error_of([&] { group.run(std::move(request), kTestTimeout); }));
      else
        group.start(request);
      const std::string unfinished = group.finish(Deadline(kTestTimeout));
      EXPECT_EQ(unfinished.empty(), waits) << unfinished;
    });
}

TEST(Failure, NonsenseIsRefusedAtOnce) {
  with_group(2, [](Communicator& group) {
    std::vector<float> x(10);
    Request request = floats(OperationKind::kBroadcast, 10, x);
    request.root = 2;
    EXPECT_IN("broadcast: a group of 2 ranks has no such root: 2", error_of([&] { group.start(request); }));
    request.root = -1;
    EXPECT_IN("broadcast: a group of 2 ranks has no such root: -1", error_of([&] { group.start(request); }));
    request = floats(OperationKind::kAllReduce, 10, x);
    request.op = ReduceOp::kXor;
    EXPECT_IN("xor is not defined for float32", error_of([&] { group.start(request); }));
    EXPECT_THROW(group.send(x.data(), 4, group.rank(), 0), Error);
    EXPECT_THROW(group.free(x.data()), Error);
  });
}

}  // namespace
}  // namespace lockstep::shm
