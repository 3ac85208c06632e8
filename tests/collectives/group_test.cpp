#include <lockstep/group.h>

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "collectives/gloo/blocked_sigpipe.h"
#include "support/ranks.h"

// What users of a Group see besides the operations themselves, which conformance_test.cpp tests: layouts of tensors,
// bytes and objects, memory, subgroups, misuse and a peer's end, on 1, 2 and 3 ranks of every engine.

namespace lockstep {
namespace {

using testing::Engine;
using testing::run_ranks;

class Collectives : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};
INSTANTIATE_TEST_SUITE_P(Engines, Collectives, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return testing::name_of(instance.param); });

/// What does not depend on the number of ranks.
class OnEachBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Engines, OnEachBackend, ::testing::Values("shm", "gloo"),
                         [](const auto& instance) { return instance.param; });

/// Small whole numbers, different on every rank and exact in every dtype.
at::Tensor values_of(int rank, at::ScalarType dtype, at::IntArrayRef shape = {3, 4}) {
  int64_t elements = 1;
  for (int64_t size : shape) elements *= size;
  return ((at::arange(elements, at::kLong) + rank) % 3).reshape(shape).to(dtype);
}

std::vector<at::Tensor> values_of_all(int world_size, at::ScalarType dtype, at::IntArrayRef shape = {3, 4}) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world_size; ++rank) all.push_back(values_of(rank, dtype, shape));
  return all;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::equal(actual, expected)) << "got\n" << actual << "\nexpected\n" << expected;
}

TEST_P(Collectives, SendAndReceiveAroundARing) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int n = group.world_size(), next = (group.rank() + 1) % n, previous = (group.rank() + n - 1) % n;
    at::Tensor first = at::empty({4}), second = at::empty({2}, at::kLong);
    Work a = group.send_async(at::full({4}, group.rank(), at::kFloat), next, 7);
    Work b = group.send_async(at::full({2}, 100 + group.rank(), at::kLong), next, 8);
    group.recv(second, previous, 8);  // by tag, not by order
    group.recv(first, previous, 7);
    a.wait();
    b.wait();
    expect_equal(first, at::full({4}, previous, at::kFloat));
    expect_equal(second, at::full({2}, 100 + previous, at::kLong));
  });
}

TEST_P(Collectives, NonContiguousEmptyAndScalarTensors) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int n = group.world_size(), me = group.rank();
    at::Tensor matrix = values_of(me, at::kFloat, {4, 6});
    group.all_reduce(matrix.t().narrow(0, 1, 3));  // columns 1 to 3
    at::Tensor expected = values_of(me, at::kFloat, {4, 6});
    expected.narrow(1, 1, 3).copy_(at::stack(values_of_all(n, at::kFloat, {4, 6})).sum(0).narrow(1, 1, 3));
    expect_equal(matrix, expected);
    expect_equal(group.all_gather(values_of(me, at::kFloat, {2, 3}).t()),
                 at::stack(values_of_all(n, at::kFloat, {2, 3})).transpose(1, 2));
    at::Tensor scalar = at::scalar_tensor(me + 1, at::kDouble);
    group.all_reduce(scalar);
    EXPECT_EQ(scalar.item<double>(), n * (n + 1) / 2);
    expect_equal(group.all_gather(at::scalar_tensor(me, at::kLong)), at::arange(n, at::kLong));
    at::Tensor empty = at::empty({0, 3});
    group.all_reduce(empty);
    group.broadcast(empty);
    EXPECT_EQ(group.all_gather(empty).sizes(), (std::vector<int64_t>{n, 0, 3}));
    const at::Tensor complex = at::complex(at::full({2}, me, at::kFloat), at::ones({2}));
    expect_equal(group.all_gather(complex.conj())[n - 1].resolve_conj(),
                 at::complex(at::full({2}, n - 1, at::kFloat), -at::ones({2})));
    at::Tensor leaf = at::full({2}, me, at::kFloat).requires_grad_();
    group.broadcast(leaf, n - 1);
    expect_equal(leaf.detach(), at::full({2}, n - 1, at::kFloat));
  });
}

TEST_P(Collectives, SeveralInFlightFinishInAnyOrder) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(at::full({1000 + i}, group.rank() + i, at::kFloat));
      works.push_back(group.all_reduce_async(tensors.back(), ReduceOp::kMax));
    }
    for (int i = 7; i >= 0; --i) {
      works[i].wait();
      EXPECT_TRUE(works[i].is_completed());
      works[i].wait();  // a second wait does no harm
      expect_equal(tensors[i], at::full({1000 + i}, group.world_size() - 1 + i, at::kFloat));
    }
    group.barrier();
  });
}

TEST_P(Collectives, TheMeanOfANumber) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    EXPECT_EQ(group.mean(2 + 4 * group.rank()), 2 * group.world_size());
    EXPECT_DOUBLE_EQ(group.mean(1e-300), 1e-300);
    EXPECT_TRUE(std::isnan(group.mean(group.rank() == 0 ? std::nan("") : 1)));
  });
}

TEST_P(Collectives, BytesOfDifferentLengths) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int n = group.world_size(), me = group.rank();
    const auto of = [](int rank) {
      return std::string(static_cast<size_t>(rank) * 3, static_cast<char>('a' + rank)) + '\0';
    };
    std::vector<std::string> all;
    for (int r = 0; r < n; ++r) all.push_back(of(r));
    EXPECT_EQ(group.all_gather_bytes(of(me)), all);
    for (int root = 0; root < n; ++root) {
      EXPECT_EQ(group.broadcast_bytes(of(me), root), of(root));
      EXPECT_EQ(group.gather_bytes(of(me), root), me == root ? all : std::vector<std::string>());
      EXPECT_EQ(group.scatter_bytes(me == root ? all : std::vector<std::string>(), root), of(me));
    }
    EXPECT_EQ(group.broadcast_bytes("", 0), "");
  });
}

TEST_P(Collectives, ObjectsWithTensorsListsAndDictionaries) {
  run_ranks(GetParam(), [](Context& context) {
    const Group& group = context.group();
    const int n = group.world_size();
    const auto of = [](int rank) {
      c10::Dict<std::string, at::Tensor> tensors;
      tensors.insert("weight", at::full({rank + 1, 2}, rank, at::kDouble));
      c10::List<int64_t> numbers;
      for (int i = 0; i < rank; ++i) numbers.push_back(i);
      return c10::ivalue::Tuple::create(
          {c10::IValue(tensors), c10::IValue(numbers), c10::IValue("rank"), c10::IValue()});
    };
    const auto check = [](const c10::IValue& object, int rank) {
      const auto& parts = object.toTupleRef().elements();
      expect_equal(parts[0].toGenericDict().at("weight").toTensor(), at::full({rank + 1, 2}, rank, at::kDouble));
      EXPECT_EQ(parts[1].toIntVector().size(), static_cast<size_t>(rank));
      EXPECT_EQ(parts[2].toStringRef(), "rank");
      EXPECT_TRUE(parts[3].isNone());
    };
    const auto all = group.all_gather_object(of(group.rank()));
    ASSERT_EQ(static_cast<int>(all.size()), n);
    for (int r = 0; r < n; ++r) check(all[r], r);
    check(group.broadcast_object(group.rank() == n - 1 ? c10::IValue(of(n - 1)) : c10::IValue(), n - 1), n - 1);
    const auto gathered = group.gather_object(of(group.rank()), 0);
    EXPECT_EQ(static_cast<int>(gathered.size()), group.rank() == 0 ? n : 0);
    std::vector<c10::IValue> parts;
    for (int r = 0; group.rank() == 0 && r < n; ++r) parts.push_back(of(r));
    check(group.scatter_object(parts, 0), group.rank());
  });
}

TEST_P(Collectives, AllocatedMemoryIsReducedAndOutlivesItsGroup) {
  run_ranks(GetParam(), [](Context& context) {
    const int n = context.world_size();
    std::optional<Group> group = context.group().subgroup([n] {
      std::vector<int> everyone;
      for (int r = 0; r < n; ++r) everyone.push_back(r);
      return everyone;
    }());
    at::Tensor tensor = group->allocate(100'000, at::kDouble);
    EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{100'000}));
    tensor.fill_(context.rank() + 1);
    group->all_reduce(tensor.narrow(0, 17, 90'000));
    EXPECT_EQ(group->allocate(0).numel(), 0);
    group.reset();
    EXPECT_EQ(tensor[17].item<double>(), n * (n + 1) / 2);
    EXPECT_EQ(tensor.sum().item<double>(), 10'000.0 * (context.rank() + 1) + 90'000.0 * n * (n + 1) / 2);
  });
}

TEST_P(OnEachBackend, IsTheOneAskedFor) {
  run_ranks(Engine{2, GetParam()},
            [backend = GetParam()](Context& context) { EXPECT_EQ(context.group().backend(), backend); });
}

TEST(Backend, IsSharedMemoryOnOneMachineAndAnUnknownNameIsRefused) {
  run_ranks(Engine{2, ""}, [](Context& context) { EXPECT_EQ(context.group().backend(), "shm"); });
  EXPECT_THROW(Context({.backend = "pigeons", .announce = false}), Error);
}

TEST_P(OnEachBackend, SubgroupsOfThreeRanksInAnotherOrder) {
  run_ranks(Engine{3, GetParam()}, [](Context& context) {
    const Group& all = context.group();
    const auto pair = all.subgroup({2, 0});
    ASSERT_EQ(pair.has_value(), context.rank() != 1);
    const auto alone = all.subgroup({1});
    ASSERT_EQ(alone.has_value(), context.rank() == 1);
    if (pair) {
      EXPECT_EQ(pair->rank(), context.rank() == 2 ? 0 : 1);
      at::Tensor tensor = at::full({2}, context.rank(), at::kFloat);
      pair->broadcast(tensor, 0);
      expect_equal(tensor, at::full({2}, 2, at::kFloat));
    } else {
      EXPECT_EQ(alone->backend(), "single");
    }
    all.barrier();
  });
}

TEST_P(OnEachBackend, MisuseIsRefusedWithAdvice) {
  run_ranks(Engine{2, GetParam()}, [](Context& context) {
    const Group& group = context.group();
    EXPECT_THROW(group.all_reduce(at::Tensor()), c10::Error);
    EXPECT_THROW(group.all_reduce(at::ones({2}, at::kInt), ReduceOp::kMean), c10::Error);
    EXPECT_THROW(group.all_reduce(at::ones({2}), ReduceOp::kAnd), c10::Error);
    EXPECT_THROW(group.all_reduce(at::eye(2).to_sparse()), c10::Error);
    EXPECT_THROW(group.broadcast(at::ones({2}), 2), c10::Error);
    EXPECT_THROW(group.send(at::ones({2}), -1), c10::Error);
    EXPECT_THROW(group.reduce_scatter(at::ones({3, 2})), c10::Error);
    EXPECT_THROW(group.all_to_all(at::ones({3}), {1, 1}, {1, 1}), c10::Error);
    EXPECT_THROW(group.subgroup({0, 0}), c10::Error);
  });
}

TEST(Gloo, AConnectionWithoutAPeerDoesNotEndTheProcess) {
  // Writing to it raises SIGPIPE, whose default is to end the process: a race with the peer's end, so that the test
  // looks at what decides it, the threads' signal masks.
  run_ranks(Engine{2, "gloo"}, [](Context& context) {
    context.group().barrier();
    int threads = 0, blocking = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      if (thread.path().filename() == std::to_string(::getpid())) continue;
      std::ifstream status(thread.path() / "status");
      for (std::string line; std::getline(status, line);) {
        if (!line.starts_with("SigBlk:")) continue;
        ++threads;
        blocking += (std::stoull(line.substr(7), nullptr, 16) >> (SIGPIPE - 1) & 1) != 0 ? 1 : 0;
      }
    }
    EXPECT_GE(blocking, 3) << "of " << threads;  // c10d's two workers and Gloo's own

    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    {
      const gloo_engine::BlockedSigpipe blocked;
      EXPECT_EQ(::write(ends[1], "x", 1), -1);
      EXPECT_EQ(errno, EPIPE);
    }
    ::close(ends[1]);
    sigset_t pending;
    ::sigpending(&pending);
    EXPECT_EQ(::sigismember(&pending, SIGPIPE), 0) << "a program of ours that unblocks it would end";
  });
}

TEST_P(OnEachBackend, AGonePeerIsAnErrorThatNamesRankAndOperation) {
  run_ranks(Engine{2, GetParam()}, [](Context& context) {
    context.group().barrier();
    if (context.rank() == 1) ::_exit(0);
    try {
      context.group().all_reduce(at::ones({1000}));
      ADD_FAILURE() << "the peer is gone";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("all_reduce #1 (float32, 1000 elements, sum) failed on rank 0 of 2"),
                std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace lockstep
