#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/clock.h"
#include "collectives/shm/backend/shm_backend.h"
#include "support/exit_code.h"
#include "support/ranks.h"

// Who may call a group (one thread at a time, and no child of fork()), that messages name the operation that the user
// called, and that a group which is gone leaves no memory behind.

namespace lockstep {
namespace {

using testing::Engine;
using testing::run_ranks;

class Rules : public ::testing::TestWithParam<Engine> {};
const Engine kTried[] = {
    {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Engines, Rules, ::testing::ValuesIn(kTried),
                         [](const auto& instance) { return testing::name_of(instance.param); });

class InSharedMemory : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, InSharedMemory, ::testing::Values(2, 3));

void expect_part(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

template <typename Body>
std::string text_of_error(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& other) {
    return "another kind of exception";
  }
  return "no error";
}

Group everyone_again(const Context& context) {
  std::vector<int> ranks(static_cast<size_t>(context.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return *context.group().subgroup(ranks);
}

// A dtype that cannot be reduced is misuse, and does not affect the group's next operation.
TEST_P(InSharedMemory, ADtypeThatCannotBeReducedIsRefused) {
  run_ranks({GetParam(), "shm"}, [](Context& context) {
    const at::Tensor tensor = at::zeros({4}, at::kFloat8_e5m2);
    try {
      context.group().all_reduce(tensor);
      ADD_FAILURE() << "it was reduced";
    } catch (const c10::Error& error) {
      expect_part("all_reduce: Float8_e5m2 tensors cannot be reduced", error.what());
    }
    EXPECT_EQ(context.group().mean(context.rank()), (context.world_size() - 1) / 2.0);
  });
}

// Two threads that called a group at the same time got sums of the wrong operands, without an error.
TEST_P(Rules, ASecondThreadInAGroupIsToldNamingBothOperations) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const Group signals = everyone_again(context);
    const at::Tensor sum = at::full({5}, context.rank() + 1, at::kLong);
    if (context.rank() == 0) {
      std::thread first([&] {
        while (text_of_error([&] { group.all_reduce(sum); }) != "no error") {  // it collided with one of those below
        }
      });
      const Deadline deadline(std::chrono::seconds(20));
      std::string text;
      do {  // an undefined tensor is refused before anything happens, if the other thread is not in yet
        text = text_of_error([&] { group.broadcast(at::Tensor()); });
      } while (text.find("was in all_reduce") == std::string::npos && !deadline.passed());
      const auto expect_told = [&](const std::string& told, const std::string& operation) {
        expect_part(operation + " was called on rank 0 while another thread of it was in all_reduce", told);
      };
      expect_told(text, "broadcast");
      expect_told(text_of_error([&] { (void)group.all_gather_object(7); }), "all_gather_object");
      expect_told(text_of_error([&] { (void)group.all_reduce_async(at::ones({5}, at::kLong)); }), "all_reduce");
      expect_told(text_of_error([&] { group.barrier(); }), "barrier");
      signals.barrier();
      first.join();
    } else {
      signals.barrier();
      group.all_reduce(sum);
    }
    const int64_t n = context.world_size();
    EXPECT_TRUE(at::equal(sum, at::full({5}, n * (n + 1) / 2, at::kLong))) << sum;
    // It did no harm, and threads may take turns.
    std::thread([&] { EXPECT_EQ(group.all_gather_bytes("x").size(), static_cast<size_t>(n)); }).join();
    group.barrier();
  });
}

TEST_P(Rules, AMismatchNamesWhatWasCalledAndEndsTheGroup) {
  run_ranks(GetParam(), [](Context& context) {
    const Group group = everyone_again(context);
    const std::string text = text_of_error([&] {
      if (context.rank() == 0)
        (void)group.all_gather_object(7);
      else
        group.gather_object(7, 1);
    });
    expect_part("all_gather_object()", text);
    expect_part("called gather_object()", text);
    // The operation's own name comes before the engine's message.
    EXPECT_EQ(text.find(context.rank() == 0 ? "all_gather_object #0" : "gather_object #0"), 0u) << text;
    if (group.backend() == "shm") expect_part("all_gather_object()", text_of_error([&] { group.barrier(); }));
    context.group().barrier();  // another group still works
  });
}

// LibTorch's pickler ran through it until the stack was full, and the other ranks waited.
TEST_P(Rules, AnObjectThatContainsItselfIsRefusedOnAllRanks) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(int64_t{1});
    list.push_back(list);
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    dict.insert(std::string("self"), dict);
    const int root = context.world_size() - 1;
    const bool odd = context.rank() == root;
    for (const c10::IValue& around : {c10::IValue(list), c10::IValue(dict)}) {
      const auto told = [&](const char* function, const auto& call) {
        expect_part(std::string(function) + ": rank " + std::to_string(root) + ": an object contains itself",
                    text_of_error(call));
      };
      const c10::IValue mine = odd ? around : c10::IValue(7);
      told("broadcast_object", [&] { (void)group.broadcast_object(mine, root); });
      told("all_gather_object", [&] { (void)group.all_gather_object(mine); });
      told("gather_object", [&] { (void)group.gather_object(mine, 0); });
      std::vector<c10::IValue> all(odd ? static_cast<size_t>(context.world_size()) : 0, c10::IValue(7));
      if (odd) all.front() = around;
      told("scatter_object", [&] { (void)group.scatter_object(all, root); });
    }
    list.clear();  // else nobody frees it
    dict.clear();
    // What is there twice, but not within itself, is no such thing.
    c10::impl::GenericList both(c10::AnyType::get()), inner(c10::AnyType::get());
    both.push_back(inner);
    both.push_back(inner);
    EXPECT_EQ(group.all_gather_object(both).size(), static_cast<size_t>(context.world_size()));
  });
}

/// LibTorch's pickler has only raw words for it.
TEST_P(Rules, AnUndefinedTensorInAnObjectIsNamedOnAllRanks) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int root = context.world_size() - 1;
    c10::impl::GenericDict inner(c10::AnyType::get(), c10::AnyType::get());
    inner.insert(std::string("weight"), at::ones({2}));
    inner.insert(std::string("bias"), at::Tensor());
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(int64_t{1});
    list.push_back(inner);
    const std::pair<c10::IValue, std::string> wrong[] = {
        {at::Tensor(), "it is an undefined tensor"},
        {list, "its element [1][bias] is an undefined tensor"},
        {std::vector<at::Tensor>{at::ones({1}), at::Tensor()}, "its element [1] is an undefined tensor"}};
    for (const auto& [object, problem] : wrong) {
      const c10::IValue mine = context.rank() == root ? object : c10::IValue(7);
      const std::string expected = "rank " + std::to_string(root) + ": an object cannot be sent: " + problem;
      expect_part("broadcast_object: " + expected, text_of_error([&] { (void)group.broadcast_object(mine, root); }));
      expect_part("all_gather_object: " + expected, text_of_error([&] { (void)group.all_gather_object(mine); }));
    }
  });
}

int mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:lockstep ") != std::string::npos;
  return count;
}

// Pending operations keep tensors, and tensors in the group's memory kept the group: such a cycle was never freed.
TEST_P(InSharedMemory, AGroupThatIsLostWithPendingOperationsGoesWhole) {
  run_ranks(GetParam(), [](Context& context) {
    context.group().barrier();
    const int before = mapped_segments();
    for (int turn = 0; turn < 3; ++turn) {
      {
        const Group group = everyone_again(context);
        const at::Tensor tensor = group.allocate(100'000);
        if (context.rank() == 0) (void)group.all_reduce_async(tensor);  // nobody else calls it
        if (context.rank() == 1) (void)group.recv_async(tensor, 0);
        context.group().barrier();
      }
      EXPECT_EQ(mapped_segments(), before) << "turn " << turn;
    }
  });
}

struct ThrowingBelow : torch::autograd::Function<ThrowingBelow> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("thrown in backward");
  }
};

TEST_P(InSharedMemory, AnExceptionInBackwardLeavesNoSegmentBehind) {
  run_ranks(GetParam(), [](Context& context) {
    context.group().barrier();
    const int before = mapped_segments();
    for (int turn = 0; turn < 3; ++turn) {
      {
        const Group group = everyone_again(context);
        torch::nn::Linear first(64, 64), second(64, 64), third(64, 64);
        // One bucket for each parameter, so that some are in flight when it throws, on one rank only.
        DistributedDataParallel model(torch::nn::Sequential(first, second, third), group,
                                      {.first_bucket_cap_mb = 0.001, .bucket_cap_mb = 0.001});
        at::Tensor middle = first(at::ones({4, 64}));
        if (context.rank() == 0) middle = ThrowingBelow::apply(middle);
        const at::Tensor loss = third(second(middle)).sum();
        if (context.rank() == 0) {
          EXPECT_ANY_THROW(loss.backward());
        }
        context.group().barrier();
      }
      EXPECT_EQ(mapped_segments(), before) << "turn " << turn;
    }
  });
}

// LOCKSTEP_JOIN_TIMEOUT_S limited the wait for the ranks, but not the wait for their group, which took as long as an
// operation may take.
TEST(SharedMemory, FormingAGroupWaitsAsLongAsJoining) {
  const auto start = Clock::now();
  const std::string text = text_of_error([] {
    shm_engine::make_backend(c10::make_intrusive<c10d::HashStore>(), 0, 3, std::chrono::minutes(5), "shm", false,
                             std::chrono::milliseconds(300));
  });
  expect_part("ranks 1, 2 have not joined", text);
  EXPECT_LT(seconds_since(start), 5);
}

/// The exit code of a child of fork() that runs `body`; -1 if it does not end within 20 s.
int exit_code_of_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
    }
    ::_exit(code);
  }
  return exit_code(child, std::chrono::seconds(20));
}

// A child that unwound its copy left the group in its parent's name, or waited for the parent's threads.
TEST_P(Rules, AChildThatEndsItsCopyOfTheContextLeavesTheRankAlone) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    group.barrier();
    const auto end_it = [&](bool by_exception) {
      return exit_code_of_child([&] {
        try {
          const Context copy = std::move(context);
          if (by_exception) throw std::runtime_error("in the child");
        } catch (const std::runtime_error&) {
        }
        return 7;
      });
    };
    EXPECT_EQ(end_it(false), 7);
    EXPECT_EQ(end_it(true), 7);
    at::Tensor sum = at::ones({1000}, at::kLong);
    group.all_reduce(sum);
    EXPECT_EQ(sum[999].item<int64_t>(), group.world_size());
    everyone_again(context).barrier();  // over the store
  });
}

TEST_P(Rules, AChildThatCallsAGroupIsTold) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    group.barrier();
    EXPECT_EQ(exit_code_of_child([&] {
                for (const std::string& text : {text_of_error([&] { group.all_reduce(at::ones({2})); }),
                                                text_of_error([&] { (void)group.all_gather_object(1); }),
                                                text_of_error([&] { everyone_again(context); })})
                  if (text.find("belongs to the process that made it") == std::string::npos) {
                    std::fprintf(stderr, "%s\n", text.c_str());
                    return 1;
                  }
                return 7;
              }),
              7);
    group.barrier();
  });
}

// Gradients lie in memory that a child did not have: reading one there ended it with SIGSEGV.
TEST_P(Rules, AChildReadsGradientsAndWritesOnlyItsOwn) {
  run_ranks(GetParam(), [](Context& context) {
    torch::nn::Linear net(8, 4);
    DistributedDataParallel model(net, context);
    model(at::full({3, 8}, context.rank() + 1, at::kFloat)).sum().backward();
    const at::Tensor expected = net->weight.grad().clone();
    EXPECT_EQ(exit_code_of_child([&] {
                if (!at::equal(net->weight.grad(), expected)) return 1;
                net->weight.mutable_grad().fill_(-1);
                return net->weight.grad().sum().item<float>() == -32 ? 7 : 2;
              }),
              7);
    EXPECT_TRUE(at::equal(net->weight.grad(), expected));
    net->zero_grad();
    model(at::full({3, 8}, context.rank() + 1, at::kFloat)).sum().backward();
    EXPECT_TRUE(at::equal(net->weight.grad(), expected));
  });
}

}  // namespace
}  // namespace lockstep
