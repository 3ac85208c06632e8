#include "collectives/hierarchical/halving.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "base/clock.h"
#include "collectives/hierarchical/reduction.h"
#include "support/ranks.h"
#include "support/tree_sum.h"

// Halving and doubling between machines: threads, each a machine of one rank, over messages that are counted; and
// processes on as many machines, made by LOCKSTEP_MACHINE.

namespace lockstep::hierarchical_engine {
namespace {

using std::chrono::milliseconds;

class MemoryWork final : public c10d::Work {
 public:
  bool wait(milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, timeout, [&] { return is_done_; });
  }
  void abort() override {}
  void end() {
    const std::lock_guard lock(mutex_);
    is_done_ = true;
    ended_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_done_ = false;
};

/// Messages between threads. As with Gloo a message is copied once both sides have asked for it, and ends for both.
class Network {
 public:
  struct Ask {
    at::Tensor bytes;
    c10::intrusive_ptr<MemoryWork> work;
  };
  c10::intrusive_ptr<c10d::Work> ask(int from, int to, int tag, bool is_sent, const at::Tensor& bytes) {
    Ask mine{bytes, c10::make_intrusive<MemoryWork>()}, theirs;
    {
      const std::lock_guard lock(mutex_);
      if (is_sent) ++messages[from], sent_bytes[from] += bytes.numel();
      auto& [sends, receives] = asked_[{from, to, tag}];
      auto& others = is_sent ? receives : sends;
      if (others.empty()) {
        (is_sent ? sends : receives).push_back(mine);
        return mine.work;
      }
      theirs = others.front();
      others.pop_front();
    }
    const Ask &source = is_sent ? mine : theirs, &target = is_sent ? theirs : mine;
    EXPECT_EQ(source.bytes.numel(), target.bytes.numel()) << "from " << from << " to " << to;
    std::memcpy(target.bytes.data_ptr(), source.bytes.const_data_ptr(), static_cast<size_t>(source.bytes.numel()));
    mine.work->end(), theirs.work->end();
    return mine.work;
  }
  /// Whether every message was received.
  bool is_empty() const {
    return std::all_of(asked_.begin(), asked_.end(),
                       [](const auto& entry) { return entry.second.first.empty() && entry.second.second.empty(); });
  }

  std::map<int, int64_t> messages, sent_bytes;

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, std::pair<std::deque<Ask>, std::deque<Ask>>> asked_;
};

class MemoryCarrier final : public Carrier {
 public:
  MemoryCarrier(Network& network, int rank) : network_(network), rank_(rank) {}
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int to, int tag) override {
    return network_.ask(rank_, to, tag, true, bytes);
  }
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int from, int tag) override {
    return network_.ask(from, rank_, tag, false, bytes);
  }
  void break_off(int) override {}

 private:
  Network& network_;
  const int rank_;
};

struct Kind {
  at::ScalarType dtype;
  shm::DataType type;
  shm::ReduceOp op = shm::ReduceOp::kSum;
};

std::vector<at::Tensor> operands_of(int machines, int64_t count, at::ScalarType dtype) {
  std::vector<at::Tensor> operands;
  for (int rank = 0; rank < machines; ++rank) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank + 1));
    operands.push_back(at::randn({count}, generator, at::TensorOptions(at::kFloat)).to(dtype));
  }
  return operands;
}

/// The result of the definition: the balanced tree, in fp32 for narrower types.
at::Tensor expected_of(const Kind& kind, std::vector<at::Tensor> operands) {
  const auto machines = static_cast<int>(operands.size());
  if (kind.op == shm::ReduceOp::kMax) return at::stack(operands).amax(0);
  if (kind.dtype == at::kBFloat16)
    for (at::Tensor& operand : operands) operand = operand.to(at::kFloat);
  at::Tensor sum = testing::tree_sum(std::move(operands));
  if (kind.op == shm::ReduceOp::kMean) sum = sum / machines;
  return sum.to(kind.dtype);
}

/// Runs `body(equipment, request)` on a thread for each machine, and checks all results.
template <typename Body>
void all_reduce(Network& network, int machines, int64_t count, const Kind& kind, const Body& body) {
  const auto operands = operands_of(machines, count, kind.dtype);
  const at::Tensor expected = expected_of(kind, operands);
  std::vector<std::string> names;
  for (int i = 0; i < machines; ++i) names.push_back(std::to_string(i));
  std::vector<at::Tensor> results;
  for (const at::Tensor& operand : operands) results.push_back(operand.clone());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < machines; ++rank)
    threads.emplace_back([&, rank] {
      const Layout layout = Layout::of(rank, names);
      Equipment equipment{.layout = layout,
                          .order = SumOrder::over(layout),
                          .machine = Machine(equipment.layout, nullptr),
                          .links = Links(std::make_shared<MemoryCarrier>(network, rank)),
                          .travelling = {},
                          .adding = {}};
      body(equipment, shm::Request{.kind = shm::OperationKind::kAllReduce,
                                   .type = kind.type,
                                   .op = kind.op,
                                   .count = static_cast<size_t>(count),
                                   .output = results[static_cast<size_t>(rank)].data_ptr()});
    });
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < machines; ++rank)
    EXPECT_TRUE(at::equal(results[static_cast<size_t>(rank)], expected)) << "rank " << rank << " of " << machines;
  EXPECT_TRUE(network.is_empty());
}

constexpr milliseconds kTimeout{60'000};

/// By halving and doubling, also between machines too few to choose it.
void halve(Equipment& equipment, const shm::Request& request) {
  const PieceSum sum(request.type, request.op, equipment.order, equipment.layout.world_size(), /*by_pairs=*/true);
  const Segment segment(equipment.layout, equipment.machine, request, 0, request.count, 1, kTimeout);
  Halving(equipment.layout, equipment.order, equipment.links, sum, segment, {0, request.count, 0}, {1, 2}, kTimeout)
      .run(equipment.travelling, equipment.adding);
}

TEST(HalvingPlan, EveryMessageHasAPeerThatExpectsIt) {
  for (int machines = 1; machines <= 70; ++machines) {
    using Message = std::tuple<int, int, size_t, size_t>;  // from, to, cells
    std::multiset<Message> sent, received;
    for (int i = 0; i < machines; ++i) {
      const auto plan = HalvingPlan::of(i, machines);
      for (const auto& level : plan.levels) {
        sent.insert({i, level.given.machine, level.given.first, level.given.last});
        received.insert({level.given.machine, i, level.first, level.last});
      }
      for (const auto& move : plan.lent) sent.insert({i, move.machine, move.first, move.last});
      for (const auto& move : plan.borrowed) received.insert({move.machine, i, move.first, move.last});
      EXPECT_LE(plan.borrowed.size(), 1u);
    }
    EXPECT_EQ(sent, received) << machines;
  }
  EXPECT_EQ(HalvingPlan::of(5, 1024).messages(), 20u);
  EXPECT_EQ(HalvingPlan::of(5, 21).messages(), 9u);   // 4 levels there and back, and one machine's lent sum
  EXPECT_EQ(HalvingPlan::of(20, 21).messages(), 4u);  // one machine lends to four
  EXPECT_EQ(HalvingPlan::of(16, 21).messages(), 9u);  // 2 levels, 4 lent, 1 borrowed
}

TEST(HalvingChoice, DependsOnSizeMachinesAndWhatAMessageCosts) {
  const auto is_faster = [](size_t bytes, int machines, int rails = 1, LinkCosts costs = {}) {
    return halving_is_faster({.bytes = bytes, .machines = machines, .rails = rails}, costs);
  };
  for (const size_t bytes : {size_t{4}, size_t{64} << 10, size_t{32} << 20})
    EXPECT_FALSE(is_faster(bytes, 16)) << bytes;
  EXPECT_FALSE(is_faster(0, 1024));
  for (const size_t bytes : {size_t{4}, size_t{64} << 10, size_t{1} << 20, size_t{32} << 20})
    EXPECT_TRUE(is_faster(bytes, 1024, 8)) << bytes;
  // Few machines and much data: the link takes the time, and each level would wait for the one before.
  EXPECT_FALSE(is_faster(4, 18));
  EXPECT_TRUE(is_faster(1 << 20, 32));
  // A message that costs nothing leaves nothing to save; one that costs more is saved earlier.
  EXPECT_FALSE(is_faster(1 << 20, 1024, 1, {.message = 0}));
  EXPECT_TRUE(is_faster(4, 18, 1, {.message = 1e-3, .latency = 0}));
  // Sums of bf16 travel as fp32 if they are added pair by pair.
  const LinkCosts slow{.byte = 8e-9};
  EXPECT_FALSE(halving_is_faster(
      {.bytes = 16 << 20, .element_bytes = 2, .direct_bytes = 2, .halving_bytes = 4, .machines = 64, .rails = 8},
      slow));
  EXPECT_TRUE(halving_is_faster(
      {.bytes = 16 << 20, .element_bytes = 2, .direct_bytes = 4, .halving_bytes = 4, .machines = 1024, .rails = 8},
      slow));
}

TEST(HalvingOrder, OnlyPlacementsWithTheTreeOverMachinesMayHalve) {
  const auto may = [](const std::string& machines) {
    std::vector<std::string> names;
    for (const char name : machines) names.emplace_back(1, name);
    return SumOrder::over(Layout::of(0, names)).is_tree_over_machines;
  };
  for (const char* machines : {"ab", "abc", "abcdefg", "aabbcc", "aaaab", "aaaabbbbcccc"}) EXPECT_TRUE(may(machines));
  for (const char* machines : {"aaabbb", "abab",
                               "aaaabb"
                               "cc",
                               "abb"})
    EXPECT_FALSE(may(machines)) << machines;
}

class OnMachines : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Machines, OnMachines, ::testing::Values(1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 63, 64));

TEST_P(OnMachines, SumsHaveTheBitsOfTheTreeAndMessagesAreAsPlanned) {
  const int machines = GetParam();
  for (const Kind& kind : {Kind{at::kFloat, shm::DataType::kFloat32}, Kind{at::kBFloat16, shm::DataType::kBFloat16},
                           Kind{at::kFloat, shm::DataType::kFloat32, shm::ReduceOp::kMean},
                           Kind{at::kBFloat16, shm::DataType::kBFloat16, shm::ReduceOp::kMean},
                           Kind{at::kBFloat16, shm::DataType::kBFloat16, shm::ReduceOp::kMax}})
    for (const int64_t count : {1, 70, 4099}) {
      Network network;
      all_reduce(network, machines, count, kind, halve);
      if (count < 70 || machines == 1) continue;
      for (int i = 0; i < machines; ++i) {
        EXPECT_EQ(network.messages[i], static_cast<int64_t>(HalvingPlan::of(i, machines).messages())) << i;
        // Each number leaves a machine at most once as a sum and once as a total; a message may have one more than its
        // share.
        const int64_t sum_bytes = kind.dtype == at::kBFloat16 && kind.op == shm::ReduceOp::kMax ? 2 : 4;
        EXPECT_LE(network.sent_bytes[i], count * (sum_bytes + at::elementSize(kind.dtype)) + 4 * network.messages[i])
            << i;
      }
    }
}

TEST_P(OnMachines, SeveralChunksAreUnderWayAtOnce) {
  const int machines = GetParam();
  if (machines > 5) return;  // others have one chunk above
  Network network;
  const int64_t count = 3'000'011;  // 6 chunks, of which 4 are under way
  all_reduce(network, machines, count, {at::kFloat, shm::DataType::kFloat32}, halve);
  for (int i = 0; i < machines && machines > 1; ++i)
    EXPECT_EQ(network.messages[i], 6 * static_cast<int64_t>(HalvingPlan::of(i, machines).messages())) << i;
}

TEST_P(OnMachines, ARealReductionChoosesIt) {
  const int machines = GetParam();
  if (machines < 2) return;
  for (const int64_t count : {1, 3000, 200'003}) {
    Network network;
    all_reduce(
        network, machines, count, {at::kFloat, shm::DataType::kFloat32},
        [](Equipment& equipment, const shm::Request& request) { Reduction(equipment, request, 5, kTimeout).run(); });
    const bool halves = halving_is_faster({.bytes = static_cast<size_t>(count) * 4, .machines = machines});
    EXPECT_FALSE(halves && machines <= kMostDirect);
    EXPECT_TRUE(halves || machines < 63 || count == 1);  // with 33, one machine of 33 has to borrow everything
    for (int i = 0; halves && count > 64 && i < machines; ++i)
      EXPECT_EQ(network.messages[i], static_cast<int64_t>(HalvingPlan::of(i, machines).messages())) << i;
  }
}

/// A machine for each of `count` letters, with `ranks` ranks.
std::string machines_of(int count, int ranks) {
  std::string machines;
  for (int i = 0; i < count; ++i) machines += std::string(static_cast<size_t>(ranks), static_cast<char>('A' + i));
  return machines;
}

TEST(HalvingProcesses, ManyMachinesHaveTheBitsOfTheTree) {
  for (const auto& [machines, ranks] : {std::pair{17, 1}, {18, 2}})
    testing::run_ranks(
        machines * ranks,
        [](Context& context) {
          const Group& group = context.group();
          EXPECT_EQ(group.backend(), "hierarchical");
          for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
            for (const int64_t count : {1, 5000, 600'011}) {
              auto operands = operands_of(group.world_size(), count, dtype);
              at::Tensor sum = operands[static_cast<size_t>(group.rank())].clone();
              at::Tensor resident = group.allocate(count, at::TensorOptions(dtype));
              resident.copy_(sum);
              for (at::Tensor& operand : operands) operand = operand.to(at::kFloat);
              const at::Tensor expected = testing::tree_sum(operands).to(dtype);
              Work first = group.all_reduce_async(sum), second = group.all_reduce_async(resident);
              second.wait(), first.wait();
              EXPECT_TRUE(at::equal(sum, expected)) << dtype << " " << count;
              EXPECT_TRUE(at::equal(resident, expected)) << dtype << " " << count;
            }
        },
        std::chrono::seconds(120), {.announce = false}, machines_of(machines, ranks));
}

TEST(HalvingProcesses, AMachineThatEndsIsAnErrorOnAllOthers) {
  for (const int gone : {17, 3})
    testing::run_ranks(
        18,
        [gone](Context& context) {
          const Group& group = context.group();
          group.barrier();
          if (context.rank() == gone) ::_exit(0);
          const at::Tensor data = at::ones({100'000});
          const auto start = Clock::now();
          std::string text = "no error";
          try {
            group.all_reduce(data);
            group.barrier();
          } catch (const Error& error) {
            text = error.what();
          }
          EXPECT_LT(seconds_since(start), 30) << text;
          // On a busy machine the gone rank's own last report may still say where it was.
          EXPECT_NE(text.find("where the ranks are: "), std::string::npos) << text;
          // A rank that leaves properly would wait for the one that is gone.
          ::_exit(::testing::Test::HasFailure() ? 1 : 0);
        },
        std::chrono::seconds(120), {.announce = false}, machines_of(18, 1));
}

}  // namespace
}  // namespace lockstep::hierarchical_engine
