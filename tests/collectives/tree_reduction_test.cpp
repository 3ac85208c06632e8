#include <lockstep/group.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/ranks.h"
#include "support/tree_sum.h"

// Reductions over Gloo: their bits are those of the tree over the ranks, as in shared memory, whatever the size, the
// operation and the number of ranks; and ranks may be as far apart as the program lets them.

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::tree_sum;

void on_gloo(int ranks, const std::function<void(const Group&)>& body) {
  run_ranks(ranks,
            [&](Context& context) {
              at::set_num_threads(1);
              body(context.group());
            },
            std::chrono::minutes(2), {.backend = "gloo", .announce = false});
}

/// What every rank brings: numbers whose sum depends on the order.
std::vector<at::Tensor> operands(int ranks, at::ScalarType dtype, int64_t elements, uint64_t seed = 1) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + static_cast<uint64_t>(rank));
    all.push_back(at::randn({elements}, generator, at::TensorOptions(at::kFloat)).to(dtype));
  }
  return all;
}

/// Along the tree, in float for 16 bits, rounded once.
at::Tensor expected(std::vector<at::Tensor> all, ReduceOp op) {
  const at::ScalarType dtype = all[0].scalar_type();
  for (at::Tensor& one : all) one = one.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
  const auto ranks = static_cast<double>(all.size());
  const at::Tensor sum = tree_sum(std::move(all));
  return (op == ReduceOp::kMean ? sum / ranks : sum).to(dtype);
}

#define EXPECT_BITS(actual, wanted) \
  EXPECT_TRUE(at::equal(actual, wanted)) << at::sum((actual) != (wanted)).item<int64_t>() << " elements differ"

void check(const Group& group, at::ScalarType dtype, int64_t elements, ReduceOp op, int root) {
  SCOPED_TRACE(c10::str(dtype, ", ", elements, " elements, root ", root));
  const int ranks = group.world_size(), me = group.rank();
  const auto all = operands(ranks, dtype, elements);
  const at::Tensor wanted = expected(all, op), &mine = all[static_cast<size_t>(me)];
  at::Tensor tensor = mine.clone();
  group.all_reduce(tensor, op);
  EXPECT_BITS(tensor, wanted);
  tensor = mine.clone();
  group.reduce(tensor, root, op);
  EXPECT_BITS(tensor, me == root ? wanted : mine);
  const int64_t row = elements / ranks;
  if (row == 0) return;
  const at::Tensor part = group.reduce_scatter(mine.narrow(0, 0, row * ranks).view({ranks, row}), op);
  EXPECT_BITS(part, wanted.narrow(0, me * row, row));
  EXPECT_BITS(mine, operands(ranks, dtype, elements)[static_cast<size_t>(me)]);
}

class GlooTree : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooTree, ::testing::Values(2, 3, 4, 5));

TEST_P(GlooTree, AddsInTheOrderOfSharedMemory) {
  on_gloo(GetParam(), [](const Group& group) {
    int turn = 0;
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
      // Where everybody gets everything; around where it no longer does; and odd sizes, also less than a slice each.
      const int64_t cut = (1 << 20) / (group.world_size() - 1) / bytes;
      for (const int64_t elements : {int64_t{1}, int64_t{7}, int64_t{1000}, cut - 1, cut, cut + 1, 2 * cut + 31}) {
        check(group, dtype, elements, turn % 2 == 0 ? ReduceOp::kSum : ReduceOp::kMean, turn % group.world_size());
        ++turn;
        if (::testing::Test::HasFailure()) return;
      }
    }
  });
}

TEST_P(GlooTree, AddsManyPiecesOfASlice) {
  on_gloo(GetParam(), [](const Group& group) {
    // More than are asked for at a time, and the last one short.
    check(group, at::kFloat, group.world_size() * ((5 << 18) + 1000) + 3, ReduceOp::kSum, 1);
  });
}

TEST_P(GlooTree, ManyAreInFlightWhereOthersWaitForEach) {
  on_gloo(GetParam(), [](const Group& group) {
    // Rank 0 starts all of them, and barriers among them, before the others have seen the end of the first.
    const int ranks = group.world_size();
    constexpr int kCount = 12;
    std::vector<at::Tensor> tensors, wanted;
    for (int i = 0; i < kCount; ++i) {
      const auto all = operands(ranks, at::kFloat, i % 3 == 0 ? 100 : 400'000, static_cast<uint64_t>(i + 1));
      tensors.push_back(all[static_cast<size_t>(group.rank())].clone());
      wanted.push_back(expected(all, ReduceOp::kSum));
    }
    std::vector<Work> works;
    for (const at::Tensor& tensor : tensors) {
      works.push_back(group.all_reduce_async(tensor));
      if (group.rank() != 0) works.back().wait();
      works.push_back(group.barrier_async());
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
    for (int i = 0; i < kCount; ++i) EXPECT_BITS(tensors[static_cast<size_t>(i)], wanted[static_cast<size_t>(i)]);
  });
}

TEST_P(GlooTree, SubgroupsAddInTheirOwnOrder) {
  on_gloo(GetParam(), [](const Group& all) {
    std::vector<int> reversed;
    for (int rank = all.world_size() - 1; rank >= 0; --rank) reversed.push_back(rank);
    const Group group = all.subgroup(reversed).value();
    check(group, at::kFloat, 300'000, ReduceOp::kSum, 0);
    // Two groups of the same ranks at once.
    const auto values = operands(all.world_size(), at::kFloat, 500'000);
    const at::Tensor here = values[static_cast<size_t>(all.rank())].clone(),
                     there = values[static_cast<size_t>(group.rank())].clone();
    const Work one = all.all_reduce_async(here), two = group.all_reduce_async(there);
    two.wait(), one.wait();
    EXPECT_BITS(here, expected(values, ReduceOp::kSum));
    EXPECT_BITS(there, here);
  });
}

TEST_P(GlooTree, MessagesOfTheProgramAreNotTakenForPiecesOfASum) {
  on_gloo(GetParam(), [](const Group& group) {
    const int next = (group.rank() + 1) % group.world_size(),
              last = (group.rank() + group.world_size() - 1) % group.world_size();
    const at::Tensor received = at::zeros({100}), sum = at::ones({100});
    const int tag = (1 << 24) - 1;
    const Work to = group.send_async(at::full({100}, group.rank() + 0.5f), next, tag);
    const Work reduced = group.all_reduce_async(sum);
    group.recv(received, last, tag);
    to.wait(), reduced.wait();
    EXPECT_BITS(received, at::full({100}, static_cast<float>(last) + 0.5f));
    EXPECT_BITS(sum, at::full({100}, static_cast<float>(group.world_size())));
    EXPECT_ANY_THROW(group.send(sum, next, tag + 1));
  });
}

}  // namespace
}  // namespace lockstep
