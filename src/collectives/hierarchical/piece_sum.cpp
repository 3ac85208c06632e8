#include "collectives/hierarchical/piece_sum.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::hierarchical_engine {
namespace {

using shm::DataType;
using shm::ReduceOp;

bool is_narrow(DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; }

at::ScalarType to_torch(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return at::kHalf;
    case DataType::kBFloat16:
      return at::kBFloat16;
    case DataType::kFloat64:
    case DataType::kComplex128:
      return at::kDouble;
    default:
      return at::kFloat;  // kComplex64 too, as pairs
  }
}

/// Converts or divides in steps below the size at which ATen would start threads.
constexpr size_t kQuietly = 16 << 10;

void convert(const void* from, at::ScalarType from_type, void* to, at::ScalarType to_type, size_t count) {
  for (size_t begin = 0; begin < count; begin += kQuietly) {
    const auto n = static_cast<int64_t>(std::min(kQuietly, count - begin));
    auto* source = static_cast<std::byte*>(const_cast<void*>(from)) + begin * c10::elementSize(from_type);
    auto* target = static_cast<std::byte*>(to) + begin * c10::elementSize(to_type);
    at::from_blob(target, {n}, to_type).copy_(at::from_blob(source, {n}, from_type));
  }
}

void divide(void* data, at::ScalarType type, size_t count, int divisor) {
  for (size_t begin = 0; begin < count; begin += kQuietly) {
    const auto n = static_cast<int64_t>(std::min(kQuietly, count - begin));
    at::from_blob(static_cast<std::byte*>(data) + begin * c10::elementSize(type), {n}, type).div_(divisor);
  }
}

void combine(DataType type, ReduceOp op, const std::vector<void*>& outputs, const std::vector<const void*>& inputs,
             size_t count) {
  if (inputs.size() == 1) {
    for (void* output : outputs)
      if (output != inputs[0]) std::memcpy(output, inputs[0], count * shm::element_bytes(type));
    return;
  }
  const auto run = shm::find_reduce(type, op, static_cast<int>(inputs.size()));
  run({outputs.data(), static_cast<int>(outputs.size()), inputs.data(), static_cast<int>(inputs.size()), count,
       nullptr});
}

}  // namespace

PieceSum::PieceSum(DataType type, ReduceOp op, const SumOrder& order, int world_size, bool by_pairs)
    : order_(order),
      world_size_(world_size),
      type_(type),
      op_(op),
      element_(shm::element_bytes(type)),
      widened_(is_narrow(type) && op != ReduceOp::kMin && op != ReduceOp::kMax &&
               (by_pairs || !order.adds_nothing_within_machines())),
      travelling_type_(widened_ ? DataType::kFloat32 : type),
      travelling_(shm::element_bytes(travelling_type_)),
      addition_(op == ReduceOp::kMean ? ReduceOp::kSum : op) {}

void PieceSum::add_partial(std::vector<const void*> inputs, std::byte* result, size_t count, Scratch& wide) const {
  if (widened_) {
    std::byte* memory = wide.get(inputs.size() * count * travelling_);
    for (const void*& input : inputs) {
      convert(input, to_torch(type_), memory, at::kFloat, count);
      input = memory;
      memory += count * travelling_;
    }
  }
  combine(travelling_type_, addition_, {result}, inputs, count);
}

void PieceSum::add_total(std::vector<std::byte*> sums, const std::vector<void*>& targets, size_t count) const {
  const bool is_ready = !widened_ && op_ != ReduceOp::kMean;
  // fp16 and bf16 sent in their own type: one kernel adds them all, and rounds once.
  if (is_narrow(type_) && !widened_ && addition_ != ReduceOp::kMin && addition_ != ReduceOp::kMax)
    return combine(type_, op_, targets, {sums.begin(), sums.end()}, count);
  for (const SumOrder::Step& step : order_.steps) {
    std::byte* left = sums[static_cast<size_t>(step.left)];
    const bool is_last = &step == &order_.steps.back();
    combine(travelling_type_, addition_, is_last && is_ready ? targets : std::vector<void*>{left},
            {left, sums[static_cast<size_t>(step.right)]}, count);
    sums.push_back(left);
  }
  if (!is_ready) write_total(sums.back(), targets, count);
}

void PieceSum::add_pair(const std::byte* left, const std::byte* right, std::byte* result, size_t count) const {
  combine(travelling_type_, addition_, {result}, {left, right}, count);
}

void PieceSum::write_total(std::byte* sum, const std::vector<void*>& targets, size_t count) const {
  const bool is_complex = type_ == DataType::kComplex64 || type_ == DataType::kComplex128;
  if (op_ == ReduceOp::kMean) divide(sum, to_torch(travelling_type_), count * (is_complex ? 2 : 1), world_size_);
  if (widened_)
    convert(sum, at::kFloat, targets.front(), to_torch(type_), count);
  else
    std::memcpy(targets.front(), sum, count * element_);
  for (void* target : targets)
    if (target != targets.front()) std::memcpy(target, targets.front(), count * element_);
}

}  // namespace lockstep::hierarchical_engine
