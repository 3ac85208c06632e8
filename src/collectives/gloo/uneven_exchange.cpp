#include "collectives/gloo/uneven_exchange.h"

#include <cstring>
#include <numeric>

#include <ATen/ATen.h>

#include "collectives/core_types.h"
#include "collectives/gloo/messages.h"
#include "collectives/operand.h"
#include "collectives/split_table.h"

namespace lockstep::gloo_engine {
namespace {

std::vector<int64_t> bytes_of_splits(const at::Tensor& tensor, const std::vector<int64_t>& splits, int world_size) {
  const int64_t rows = tensor.size(0), row = rows == 0 ? 0 : bytes_of(tensor) / rows;
  std::vector<int64_t> bytes(static_cast<size_t>(world_size), rows / world_size * row);
  for (size_t rank = 0; rank < splits.size(); ++rank) bytes[rank] = splits[rank] * row;
  return bytes;
}

void compare_splits(const UnevenExchange& task, const Messages& messages) {
  SplitTable table(task.world_size);
  uint64_t* number = table.row(task.rank);
  for (const auto* list : {&task.sent, &task.received})
    for (const int64_t bytes : *list) *number++ = static_cast<uint64_t>(bytes) / task.element_bytes;
  const auto columns = static_cast<int64_t>(table.numbers_in_row());
  const at::Tensor rows = at::from_blob(table.data(), {task.world_size, columns}, at::kLong).clone();
  all_gather(rows, rows[task.rank], task.rank, task.world_size, messages);
  std::memcpy(table.data(), rows.const_data_ptr(), rows.nbytes());
  table.check();
}

}  // namespace

UnevenExchange UnevenExchange::of(const at::Tensor& output, const std::vector<int64_t>& output_splits,
                                  const at::Tensor& input, const std::vector<int64_t>& input_splits, int rank,
                                  int world_size) {
  return {.rank = rank,
          .world_size = world_size,
          .input = as_bytes(input),
          .output = as_bytes(output),
          .sent = bytes_of_splits(input, input_splits, world_size),
          .received = bytes_of_splits(output, output_splits, world_size),
          .element_bytes = shm::element_bytes(to_moved(input.scalar_type()))};
}

void run(const UnevenExchange& task, const Messages& messages) {
  compare_splits(task, messages);
  const auto part_of = [](const at::Tensor& all, const std::vector<int64_t>& bytes, int peer) {
    const auto mine = bytes.begin() + peer;
    return all.narrow(0, std::accumulate(bytes.begin(), mine, int64_t{0}), *mine);
  };
  exchange_parts([&](int peer) { return part_of(task.input, task.sent, peer); },
                 [&](int peer) { return part_of(task.output, task.received, peer); }, task.rank, task.world_size,
                 Stage::kOperands, messages);
}

}  // namespace lockstep::gloo_engine
