#include "collectives/hierarchical/piece_sum.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace lockstep::hierarchical_engine {
namespace {

/// Four ranks on two machines, so each machine has a partial sum of two.
const Layout kLayout = Layout::of(0, {"a", "a", "b", "b"});

/// What a piece of all ranks' `inputs` comes to, by way of partial sums.
at::Tensor sum_of(const std::vector<at::Tensor>& inputs, shm::DataType type, shm::ReduceOp op) {
  const SumOrder order = SumOrder::over(kLayout);
  const PieceSum sum(type, op, order, kLayout.world_size());
  const auto count = static_cast<size_t>(inputs[0].numel());
  Scratch wide;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> partials;
  for (const SumOrder::Partial& partial : order.partials) {
    std::vector<const void*> given;
    for (int rank = partial.first; rank < partial.last; ++rank)
      given.push_back(inputs[static_cast<size_t>(rank)].const_data_ptr());
    memory.emplace_back(count * sum.travelling_bytes());
    partials.push_back(memory.back().data());
    sum.add_partial(std::move(given), partials.back(), count, wide);
  }
  at::Tensor first = at::empty_like(inputs[0]), second = at::empty_like(inputs[0]);
  sum.add_total(partials, {first.data_ptr(), second.data_ptr()}, count);
  EXPECT_TRUE(at::equal(first, second));
  return first;
}

std::vector<at::Tensor> inputs_of(at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < 4; ++rank) inputs.push_back((at::arange(1, 38, at::kFloat) / (rank + 3)).to(dtype));
  return inputs;
}

TEST(PieceSum, AddsAsTheBalancedTreeDoes) {
  const auto inputs = inputs_of(at::kFloat);
  const at::Tensor tree = (inputs[0] + inputs[1]) + (inputs[2] + inputs[3]);
  EXPECT_TRUE(at::equal(sum_of(inputs, shm::DataType::kFloat32, shm::ReduceOp::kSum), tree));
  EXPECT_TRUE(at::equal(sum_of(inputs, shm::DataType::kFloat32, shm::ReduceOp::kMean), tree / 4));
  EXPECT_TRUE(at::equal(sum_of(inputs, shm::DataType::kFloat32, shm::ReduceOp::kMax), at::stack(inputs).amax(0)));
}

TEST(PieceSum, NarrowTypesAreRoundedOnce) {
  const auto inputs = inputs_of(at::kBFloat16);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& input : inputs) wide.push_back(input.to(at::kFloat));
  const at::Tensor tree = (wide[0] + wide[1]) + (wide[2] + wide[3]);
  EXPECT_TRUE(at::equal(sum_of(inputs, shm::DataType::kBFloat16, shm::ReduceOp::kSum), tree.to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(sum_of(inputs, shm::DataType::kBFloat16, shm::ReduceOp::kMean), (tree / 4).to(at::kBFloat16)));
  const SumOrder order = SumOrder::over(kLayout);
  EXPECT_EQ(PieceSum(shm::DataType::kBFloat16, shm::ReduceOp::kSum, order, 4).travelling_bytes(), 4u);
  EXPECT_EQ(PieceSum(shm::DataType::kBFloat16, shm::ReduceOp::kMin, order, 4).travelling_bytes(), 2u);
}

}  // namespace
}  // namespace lockstep::hierarchical_engine
