#include "collectives/device_engine.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "checkpoint/failure.h"
#include "collectives/nccl/nccl_backend.h"
#include "collectives/work.h"
#include "support/complaint.h"
#include "support/ranks.h"

// Which engine works on which tensor, and what ranks are told if there is none. Tensors on the meta device, which have
// no data, stand for tensors on devices that this machine may lack.

namespace lockstep {
namespace {

using testing::complaint;
using testing::failure;
using testing::run_ranks;

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// Runs until the test says how it ended.
class RunningWork final : public c10d::Work {
 public:
  bool isCompleted() override { return has_ended; }
  bool wait(std::chrono::milliseconds) override {
    ADD_FAILURE() << "the host waits for the device";
    return true;
  }
  void synchronize() override { ++orders; }
  std::exception_ptr exception() const override { return failure; }
  void end(const std::string& why) {
    if (!why.empty()) failure = std::make_exception_ptr(std::runtime_error(why));
    has_ended = true;
  }
  std::atomic<bool> has_ended = false;
  std::exception_ptr failure;
  int orders = 0;
};

/// Counts what it is asked for; every other rank says the same as this one.
class FakeBackend final : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    output.view({getSize(), -1}).copy_(input.view({1, -1}).expand({getSize(), -1}));
    return done();
  }
  void abort() override { ++aborts; }
  int operations = 0, aborts = 0;
  c10::intrusive_ptr<c10d::Work> next = nullptr;  ///< the next operation's; null: one that is done

 private:
  c10::intrusive_ptr<c10d::Work> done() {
    ++operations;
    if (next) return std::exchange(next, nullptr);
    return c10::make_intrusive<DoneWork>();
  }
};

using FakePointer = c10::intrusive_ptr<FakeBackend>;

at::Tensor on_a_device(at::IntArrayRef sizes) { return at::empty(sizes, at::device(at::kMeta)); }

/// Rank 0 of a group of two whose engines are fakes.
struct FakeGroup {
  FakePointer cpu;
  std::vector<FakePointer> device;
  std::vector<c10::DeviceType> types;
  Group group = make_group(c10::make_intrusive<c10d::HashStore>(), 0, 2,
                           {.cpu =
                                [this](const auto&, int rank, int size) {
                                  cpu = c10::make_intrusive<FakeBackend>(rank, size);
                                  return cpu;
                                },
                            .device =
                                [this](c10::DeviceType type, const auto&, int rank, int size) {
                                  types.push_back(type);
                                  device.push_back(c10::make_intrusive<FakeBackend>(rank, size));
                                  return device.back();
                                }});
};

TEST(DeviceEngine, IsMadeByTheFirstTensorOnADevice) {
  FakeGroup fake;
  fake.group.all_reduce(at::ones({2}));
  fake.group.all_reduce(on_a_device({0}));  // sends nothing
  EXPECT_TRUE(fake.device.empty());
  EXPECT_EQ(fake.cpu->operations, 1);
  fake.group.all_reduce(on_a_device({2}));
  ASSERT_EQ(fake.types, std::vector<c10::DeviceType>{at::kMeta});
  EXPECT_EQ(fake.device[0]->operations, 1);
  const int told = fake.cpu->operations;
  EXPECT_GT(told, 1) << "the ranks agree by the CPU's engine that all have one";
  fake.group.broadcast(on_a_device({2}));
  EXPECT_EQ(fake.group.all_gather(on_a_device({3})).sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(fake.device.size(), 1u);
  EXPECT_EQ(fake.device[0]->operations, 3);
  EXPECT_EQ(fake.cpu->operations, told + 2) << "the CPU's engine compares the ranks' calls";
  fake.group.all_reduce(at::ones({2}));
  (void)fake.group.all_gather_bytes("bytes");
  EXPECT_EQ(fake.device[0]->operations, 3);
  EXPECT_EQ(fake.group.backend(), "fake");
}

TEST(DeviceEngine, OfASubgroupIsItsOwnAndStaysUntilAllRanksAreDone) {
  FakeGroup fake;
  fake.group.all_reduce(on_a_device({2}));
  {
    const auto sub = fake.group.subgroup({1, 0});
    sub->all_reduce(on_a_device({2}));
  }
  ASSERT_EQ(fake.device.size(), 2u);
  EXPECT_EQ(fake.device[1]->getRank(), 1);
  EXPECT_EQ(fake.device[0]->operations, 1);
  EXPECT_GT(fake.device[1].use_count(), 1u) << "the peer may still read this rank's memory";
  release_device_engines(fake.group);
  EXPECT_EQ(fake.device[0].use_count(), 1u);
  EXPECT_EQ(fake.device[1].use_count(), 1u);
}

TEST(DeviceEngine, WantsInputAndOutputOnOneDevice) {
  FakeGroup fake;
  const auto said = [&](const at::Tensor& output, const at::Tensor& input) {
    return complaint([&] { fake.group.all_gather_into_tensor(output, input); });
  };
  EXPECT_EQ(said(at::empty({2, 3}), on_a_device({3})), "the input is on meta, the output is on cpu; move one of them");
  EXPECT_EQ(said(on_a_device({2, 3}), at::empty({3})), "the input is on cpu, the output is on meta; move one of them");
  EXPECT_NE(complaint([&] { (void)fake.group.gather_async(at::empty({2, 3}), on_a_device({3})); }), "");
  EXPECT_NE(complaint([&] { (void)fake.group.scatter_async(at::empty({3}), on_a_device({2, 3})); }), "");
  EXPECT_NE(complaint([&] { (void)fake.group.reduce_scatter_tensor(at::empty({3}), on_a_device({2, 3})); }), "");
  EXPECT_NE(complaint([&] { (void)fake.group.all_to_all_async(at::empty({2}), on_a_device({2})); }), "");
  EXPECT_TRUE(fake.device.empty());
}

TEST(DeviceEngine, OfAWorldOfOneIsItsOnlyEngine) {
  const Group group = make_group({}, 0, 1, {});
  group.all_reduce(on_a_device({2}));
  EXPECT_EQ(group.all_gather(on_a_device({2})).sizes(), (std::vector<int64_t>{1, 2}));
}

std::string said_to(const Group& group, const at::Tensor& tensor) {
  try {
    group.all_reduce(tensor);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(DeviceEngine, ThatOneRankCannotMakeIsAnErrorOfAll) {
  for (int ranks : {2, 3})
    run_ranks(ranks, [](Context& context) {
      const Group::State& state = state_of(context.group());
      bool has_device = context.rank() != 1;
      const Group group =
          make_group(c10::make_intrusive<c10d::PrefixStore>("fake", state.store), state.rank, state.world_size,
                     {.cpu = state.factories.cpu, .device = [&](c10::DeviceType, const auto&, int rank, int size) {
                        if (!has_device) throw Error("no device is left");
                        return c10::make_intrusive<FakeBackend>(rank, size);
                      }});
      EXPECT_EQ(said_to(group, on_a_device({2})), "rank 1: no device is left");
      at::Tensor one = at::ones({1});
      group.all_reduce(one);
      EXPECT_EQ(one.item<float>(), context.world_size());
      has_device = true;
      EXPECT_EQ(said_to(group, on_a_device({2})), "nothing");
    });
}

TEST(DeviceEngine, IsRefusedForDevicesThatHaveNone) {
  for (const char* backend : {"shm", "gloo"})
    run_ranks(testing::Engine{2, backend}, [](Context& context) {
      const std::string said = said_to(context.group(), on_a_device({2}));
      EXPECT_EQ(said.rfind("ranks 0, 1: ", 0), 0u) << said;
      EXPECT_NE(said.find("not on meta"), std::string::npos) << said;
      EXPECT_NE(said.find("move the tensor"), std::string::npos) << said;
      context.group().barrier();  // nothing is broken
    });
}

TEST(DeviceEngine, ATensorOnTheCpuOnOneRankAloneIsNoticed) {
  run_ranks(testing::Engine{2, "shm"}, [](Context& context) {
    const std::string said = said_to(context.group(), context.rank() == 0 ? at::ones({2}) : on_a_device({2}));
    EXPECT_NE(said.find("all_gather"), std::string::npos) << said;
    EXPECT_NE(said.find("all_reduce"), std::string::npos) << said;
  });
}

/// A group whose engine for devices, like NCCL, compares nothing.
Group blind_group(Context& context, FakePointer& device) {
  const Group::State& state = state_of(context.group());
  Group group =
      make_group(c10::make_intrusive<c10d::PrefixStore>("blind", state.store), state.rank, state.world_size,
                 {.cpu = state.factories.cpu, .device = [&](c10::DeviceType, const auto&, int rank, int size) {
                    device = c10::make_intrusive<FakeBackend>(rank, size);
                    return device;
                  }});
  group.all_reduce(on_a_device({2}));
  group.broadcast(on_a_device({2}), 1);
  return group;
}

const testing::Engine kSeveralRanks[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};

TEST(DeviceCalls, ThatDifferAreAnErrorOfAllRanks) {
  using Call = std::function<void(const Group&)>;
  const auto reduces = [](int64_t size, at::ScalarType dtype = at::kFloat, ReduceOp op = ReduceOp::kSum) -> Call {
    return [=](const Group& group) { group.all_reduce(on_a_device({size}).to(dtype), op); };
  };
  const auto moves = [](int64_t size, int root) -> Call {
    return [=](const Group& group) { group.broadcast(on_a_device({size}), root); };
  };
  const struct {
    const char* what;
    Call usual, last;
    std::string usual_text, last_text;
  } kinds[] = {
      {"size", reduces(8), reduces(7), "all_reduce(float32, 8 elements, sum)", "all_reduce(float32, 7 elements, sum)"},
      {"dtype", reduces(8), reduces(8, at::kInt), "(float32, 8 elements", "(int32, 8 elements"},
      {"operation", reduces(8), reduces(8, at::kFloat, ReduceOp::kMax), "sum)", "max)"},
      {"root", moves(8, 0), moves(8, 1), "root 0)", "root 1)"},
      {"kind", moves(8, 0), reduces(8), "broadcast(", "all_reduce("},
      {"device", reduces(8), [](const Group& group) { group.all_reduce(at::ones({8})); },
       "an operation on tensors on a device", "all_reduce(float32, 8 elements, sum)"},
  };
  for (const testing::Engine& engine : kSeveralRanks)
    for (const auto& kind : kinds) {
      SCOPED_TRACE(name_of(engine) + ", another " + kind.what);
      run_ranks(engine, [&](Context& context) {
        FakePointer device;
        const Group group = blind_group(context, device);
        const bool is_last = context.rank() == context.world_size() - 1;
        const std::string said = failure([&] { (is_last ? kind.last : kind.usual)(group); });
        EXPECT_NE(said.find("ranks disagree"), std::string::npos) << said;
        EXPECT_NE(said.find(kind.usual_text), std::string::npos) << said;
        EXPECT_NE(said.find(kind.last_text), std::string::npos) << said;
        const bool on_device = !is_last || kind.what != std::string("device");
        if (on_device) {
          EXPECT_GE(device->aborts, 1) << "the device may still wait for the other ranks";
        }
        const int started = group.backend() == "shm" || !on_device ? 2 : 3;
        EXPECT_EQ(device->operations, started) << "shared memory compares before the device moves anything";
        EXPECT_NE(failure([&] { group.all_reduce(on_a_device({2})); }), "");
      });
    }
}

TEST(DeviceCalls, WithSplitsThatDoNotFitAreAnErrorOfAllRanks) {
  for (const testing::Engine& engine : kSeveralRanks) {
    SCOPED_TRACE(name_of(engine));
    run_ranks(engine, [](Context& context) {
      FakePointer device;
      const Group group = blind_group(context, device);
      const auto n = static_cast<size_t>(group.world_size());
      const std::vector<int64_t> threes(n, 3);
      std::vector<int64_t> expected = threes;
      const auto rows = static_cast<int64_t>(3 * n);
      (void)group.all_to_all_async(on_a_device({rows, 2}), on_a_device({rows, 2}), threes, threes);
      if (context.rank() == 1) ++expected[0];
      const at::Tensor output = on_a_device({context.rank() == 1 ? rows + 1 : rows, 2});
      const std::string said = failure([&] {
        (void)group.all_to_all_async(output, on_a_device({rows, 2}), threes, expected);
      });
      EXPECT_NE(said.find("rank 0"), std::string::npos) << said;
      EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
      group.all_reduce(on_a_device({2}));  // nothing was sent
    });
  }
}

TEST(DeviceCalls, OfARankThatHasEndedAreAnErrorOfTheOthers) {
  for (const testing::Engine& engine : kSeveralRanks) {
    SCOPED_TRACE(name_of(engine));
    run_ranks(engine, [](Context& context) {
      FakePointer device;
      const Group group = blind_group(context, device);
      if (context.rank() == 1) return;
      EXPECT_NE(failure([&] { group.all_reduce(on_a_device({2})); }), "");
      EXPECT_GE(device->aborts, 1);
    });
  }
}

TEST(DeviceCalls, ThatDifferAreFoundWithoutAWait) {
  for (const testing::Engine& engine : kSeveralRanks) {
    SCOPED_TRACE(name_of(engine));
    run_ranks(engine, [](Context& context) {
      FakePointer device;
      const Group group = blind_group(context, device);
      (void)group.all_reduce_async(on_a_device({4}));
      const std::string said = failure([&] { (void)group.all_reduce_async(on_a_device({context.rank() + 1})); });
      if (said.empty()) group.barrier();  // by then all ranks' calls are there
      EXPECT_EQ(said.empty(), group.backend() != "shm");
      const std::string found = state_of(group).device_calls.problem();
      EXPECT_NE(found.find("rank 0 called all_reduce(float32, 1 elements, sum)"), std::string::npos) << found;
      EXPECT_NE(failure([&] { (void)group.all_reduce_async(on_a_device({4})); }), "");
    });
  }
}

TEST(NcclEngine, SaysWhatIsMissingWhereItCannotBe) {
  if (torch::cuda::device_count() > 0) GTEST_SKIP() << "SKIPPED BECAUSE this machine has a GPU";
  std::string said;
  try {
    nccl_engine::make_backend(at::kCUDA, c10::make_intrusive<c10d::HashStore>(), 0, 2, std::chrono::seconds(1));
  } catch (const std::exception& error) {
    said = error.what();
  }
  // The second text is that of a build with NCCL on a machine without a GPU.
  EXPECT_TRUE(
      said ==
          "this Lockstep was built without NCCL, so it communicates tensors on the CPU only, not on cuda; build "
          "it with a LibTorch for CUDA and with nccl.h, or move the tensor to the CPU" ||
      said.find("no GPUs found") != std::string::npos)
      << said;
}

/// A group with an all-reduce on its device that no thread waits for.
struct Ordered {
  Ordered() {
    fakes.group.all_reduce(on_a_device({2}));  // makes the device's engine
    fakes.device[0]->next = running;
    order_after(fakes.group.all_reduce_async(on_a_device({3})));
  }
  FakeGroup fakes;
  c10::intrusive_ptr<RunningWork> running = c10::make_intrusive<RunningWork>();
};

TEST(OrderAfter, OrdersTheStreamAndReturns) {
  Ordered ordered;
  EXPECT_EQ(ordered.running->orders, 1);
  EXPECT_FALSE(ordered.running->isCompleted());
  ordered.fakes.group.all_reduce(at::ones({2}));
  ordered.running->end("");
  EXPECT_EQ(state_of(ordered.fakes.group).device_works.finish(Deadline(std::chrono::seconds(5))), "");
}

TEST(OrderAfter, TheNextCallThrowsWhatFailedOnTheDevice) {
  Ordered ordered;
  ordered.running->end("a link is down");
  Group::State& state = state_of(ordered.fakes.group);
  for (const Deadline deadline(std::chrono::seconds(5)); !state.device_works.has_failed() && !deadline.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::string told = failure([&] { ordered.fakes.group.all_reduce(at::ones({2})); });
  EXPECT_NE(told.find("(float32, 3 elements, sum) failed on rank 0 of 2"), std::string::npos) << told;
  EXPECT_NE(told.find("a link is down"), std::string::npos) << told;
  EXPECT_EQ(ordered.fakes.device[0]->aborts, 1) << "the host is told before the device goes on";
  EXPECT_NE(failure([&] { ordered.fakes.group.barrier(); }), "");
}

TEST(OrderAfter, AFailureThatNoCallCanThrowEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto wait_for_the_device = [] {
    Ordered ordered;
    ordered.running->end("a link is down");
    std::this_thread::sleep_for(std::chrono::seconds(30));
  };
  const auto start = Clock::now();
  EXPECT_EXIT(wait_for_the_device(), ::testing::ExitedWithCode(EXIT_FAILURE),
              "all_reduce #[0-9]+ .float32, 3 elements, sum. failed on rank 0 of 2.*a link is down(.|\n)*This process "
              "ends now");
  EXPECT_LT(seconds_since(start), 15);
}

TEST(OrderAfter, AFailureThatAnotherErrorHasToldOfDoesNotEndTheProcess) {
  Ordered ordered;
  abort_device_engine(state_of(ordered.fakes.group));
  ordered.running->end("the engine has been aborted");
  std::this_thread::sleep_for(DeviceWorks::kGrace + std::chrono::milliseconds(300));
  EXPECT_EQ(ordered.fakes.device[0]->aborts, 1);
}

TEST(OrderAfter, WhatTheDeviceHasNotDoneInTimeHasFailed) {
  DeviceWorks works;
  const auto add = [&](Clock::duration time) {
    works.add(
        {c10::make_intrusive<RunningWork>(), Clock::now() + time, [](const std::string& cause) { return cause; }});
  };
  add(std::chrono::hours(1));
  EXPECT_NE(works.finish(Deadline(std::chrono::milliseconds(10))).find("when this rank left"), std::string::npos);
  EXPECT_FALSE(works.has_failed());
  works.forget();
  add(std::chrono::milliseconds(1));
  EXPECT_NE(works.finish(Deadline(std::chrono::seconds(5))).find("in time"), std::string::npos);
  EXPECT_TRUE(works.has_failed());
}

}  // namespace
}  // namespace lockstep
