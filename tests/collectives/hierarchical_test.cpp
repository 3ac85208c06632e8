#include "collectives/hierarchical/hierarchical_backend.h"

#include <unistd.h>

#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "collectives/hierarchical/layout.h"
#include "collectives/hierarchical/pieces.h"
#include "collectives/operations.h"
#include "support/ranks.h"
#include "support/tree_sum.h"

// What only an engine for several machines has. That it does what every engine does is in conformance_test. Machines
// are made by LOCKSTEP_MACHINE; hosts_test has network namespaces.

namespace lockstep {
namespace {

using hierarchical_engine::Layout;
using hierarchical_engine::Piece;
using hierarchical_engine::SumOrder;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Engine;
using testing::run_ranks;

Layout layout_of(int rank, const std::string& machines) {
  std::vector<std::string> names;
  for (const char name : machines) names.emplace_back(1, name);
  return Layout::of(rank, names);
}

/// "(0+1)+2" in terms of ranks, with brackets around what a machine adds.
std::string text_of(const SumOrder& order) {
  std::vector<std::string> nodes;
  for (const auto& partial : order.partials)
    nodes.push_back("[" + std::to_string(partial.first) + "-" + std::to_string(partial.last - 1) + "]");
  for (const auto& step : order.steps)
    nodes.push_back("(" + nodes[static_cast<size_t>(step.left)] + "+" + nodes[static_cast<size_t>(step.right)] + ")");
  return nodes.back();
}

TEST(HierarchicalOrder, IsTheTreeOverTheRanksWhateverTheirMachines) {
  const auto order = [](const std::string& machines) { return text_of(SumOrder::over(layout_of(0, machines))); };
  EXPECT_EQ(order("aabb"), "([0-1]+[2-3])");
  EXPECT_EQ(order("aaabbb"), "(([0-1]+([2-2]+[3-3]))+[4-5])");
  EXPECT_EQ(order("aaab"), "([0-1]+([2-2]+[3-3]))");
  EXPECT_EQ(order("aabbcc"), "(([0-1]+[2-3])+[4-5])");
  EXPECT_EQ(order("abab"), "(([0-0]+[1-1])+([2-2]+[3-3]))");
  EXPECT_EQ(order("aaaab"), "([0-3]+[4-4])");
}

TEST(HierarchicalPieces, CoverEveryElementOnceAndAreServedByEveryRail) {
  for (const std::string machines : {"aab", "aabb", "aabbcc", "aaabbc", "abcabc"})
    for (const size_t count : {1, 7, 5000, 300'000, 1'000'003})
      for (const auto kind : {shm::OperationKind::kAllReduce, shm::OperationKind::kReduce}) {
        const Layout layout = layout_of(0, machines);
        const shm::Request request{.kind = kind, .root = 1};
        size_t at = 0;
        std::set<int> rails, homes;
        for (const Piece& piece : pieces_of(request, count, layout, 4, 4)) {
          EXPECT_EQ(piece.begin, at);
          at += piece.count;
          rails.insert(piece.rail), homes.insert(piece.home);
        }
        EXPECT_EQ(at, count);
        if (count < 100'000) continue;
        EXPECT_EQ(static_cast<int>(rails.size()), layout.rails());
        const bool shared_out = kind == shm::OperationKind::kAllReduce && layout.machines() > 2;
        EXPECT_EQ(static_cast<int>(homes.size()), shared_out ? layout.machines() : 1);
      }
}

TEST(Hierarchical, TheEngineDependsOnWhereTheRanksAre) {
  run_ranks(Engine{4, "", "aabb"}, [](Context& context) {
    const Group& all = context.group();
    EXPECT_EQ(all.backend(), "hierarchical");
    const auto check = [&](const std::vector<int>& ranks, const std::string& backend) {
      const auto group = all.subgroup(ranks);
      if (!group) return;
      EXPECT_EQ(group->backend(), backend);
      EXPECT_EQ(group->mean(1), 1);
    };
    check({0, 1}, "shm");
    check({3, 2}, "shm");
    check({0, 2}, "gloo");
    check({3, 1, 0}, "hierarchical");
    check({1}, "single");
  });
  run_ranks(Engine{2, "", "ab"}, [](Context& context) { EXPECT_EQ(context.group().backend(), "gloo"); });
  run_ranks(Engine{3, "hierarchical", "aaa"}, [](Context& context) { EXPECT_EQ(context.group().backend(), "shm"); });
}

class OnMachines : public ::testing::TestWithParam<Engine> {};
const Engine kPlaces[] = {{3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}, {4, "hierarchical", "aabc"}};
INSTANTIATE_TEST_SUITE_P(Places, OnMachines, ::testing::ValuesIn(kPlaces),
                         [](const auto& instance) { return testing::name_of(instance.param); });

TEST_P(OnMachines, LargeSumsHaveTheBitsOfTheTree) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const int64_t elements = 8'500'001;  // more than is reduced between two meetings, in fp32
      std::vector<at::Tensor> inputs;
      for (int rank = 0; rank < group.world_size(); ++rank) {
        auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank));
        inputs.push_back(at::randn({elements}, generator, at::TensorOptions(at::kFloat)).to(dtype));
      }
      at::Tensor own = inputs[static_cast<size_t>(group.rank())].clone();
      at::Tensor resident = group.allocate(elements, at::TensorOptions(dtype));
      resident.copy_(own);
      for (at::Tensor& input : inputs) input = input.to(at::kFloat);
      const at::Tensor expected = testing::tree_sum(inputs).to(dtype);
      Work first = group.all_reduce_async(own), second = group.all_reduce_async(resident);
      second.wait(), first.wait();
      testing::expect_same(own, expected, "the sum in memory of its own");
      testing::expect_same(resident, expected, "the sum in the machine's memory");
    }
  });
}

/// The text of the error, which must come in time.
std::string failure_of(const std::function<void()>& call) {
  const auto start = Clock::now();
  std::string text = "no error";
  try {
    call();
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 6) << text;
  return text;
}

void expect_parts(const std::vector<std::string>& parts, const std::string& text) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text << "\nhas no\n" << part;
}

TEST_P(OnMachines, ADifferenceIsNamedWhoeverDiffers) {
  for (int odd = 0; odd < GetParam().world_size; ++odd)
    run_ranks(GetParam(), [odd](Context& context) {
      const Group& group = context.group();
      group.barrier();
      const at::Tensor data = at::full({1000}, context.rank(), at::kFloat);
      const std::string text = failure_of([&] {
        if (context.rank() == odd)
          group.broadcast(data, 0), group.barrier();
        else
          group.all_reduce(data), group.barrier();
      });
      expect_parts({"ranks disagree on operation ", "rank " + std::to_string(odd) + " called broadcast(",
                    " called all_reduce(float32, 1000 elements, sum)"},
                   text);
    });
}

TEST_P(OnMachines, AFutureHasTheErrorOfItsOperation) {
  run_ranks(GetParam(), [](Context& context) {
    c10d::Backend& engine = *state_of(context.group()).backend;
    std::vector<at::Tensor> sum{at::ones({1000})}, differs{at::ones({context.is_main() ? 1000 : 2000})};
    const auto good = engine.allreduce(sum)->getFuture();
    good->waitAndThrow();
    EXPECT_EQ(good->value().toTensorVector().at(0)[999].item<int>(), context.world_size());
    const auto failed = engine.allreduce(differs)->getFuture();
    // It used to be complete, without an error.
    expect_parts({"ranks disagree on operation "}, failure_of([&] { failed->waitAndThrow(); }));
    EXPECT_TRUE(failed->hasError());
  });
}

TEST_P(OnMachines, ACallbackThatThrowsHarmsNoOperation) {
  run_ranks(GetParam(), [](Context& context) {
    c10d::Backend& engine = *state_of(context.group()).backend;
    for (int turn = 0; turn < 20; ++turn) {
      std::vector<at::Tensor> sum{at::ones({1000})};
      const auto work = engine.allreduce(sum);
      try {
        work->getFuture()->addCallback([](c10::ivalue::Future&) { throw Error("of the callback"); });
      } catch (const Error&) {
        // It was complete already, so the callback ran here.
      }
      work->wait();
      EXPECT_EQ(sum[0][999].item<int>(), context.world_size());
    }
  });
}

TEST_P(OnMachines, ARankThatEndsIsNamedOnAllOthers) {
  for (int gone = 0; gone < GetParam().world_size; ++gone)
    run_ranks(GetParam(), [gone](Context& context) {
      const Group& group = context.group();
      group.barrier();
      if (context.rank() == gone) ::_exit(0);
      const at::Tensor data = at::ones({100'000});
      const std::string text = failure_of([&] {
        for (int i = 0; i < 3; ++i) group.all_reduce(data);
      });
      expect_parts({"all_reduce #1 (float32, 100000 elements, sum) failed on rank " + std::to_string(context.rank()),
                    "where the ranks are: ", "rank " + std::to_string(gone) + " reported nothing: it has ended"},
                   text);
      EXPECT_THROW(group.barrier(), Error) << "the group has ended";
      ::_exit(::testing::Test::HasFailure() ? 1
                                            : 0);  // a rank that leaves properly would wait for the one that is gone
    });
}

TEST_P(OnMachines, ARankThatIsLateIsNoErrorUntilTheTimeIsOver) {
  const auto body = [](Context& context) {
    const Group& group = context.group();
    const int n = group.world_size();
    for (int turn = 0; turn < 2; ++turn) {
      if (context.rank() == n - 1 - turn) std::this_thread::sleep_for(milliseconds(700));
      EXPECT_EQ(group.mean(turn), turn);
    }
    if (context.rank() == n - 1) return std::this_thread::sleep_for(milliseconds(4000));
    expect_parts({"where the ranks are: ", "failed in operation 3, barrier()"}, failure_of([&] { group.barrier(); }));
  };
  run_ranks(GetParam().world_size, body, seconds(30),
            {.collective_timeout = seconds(2), .backend = "hierarchical", .announce = false}, GetParam().machines);
}

}  // namespace
}  // namespace lockstep
