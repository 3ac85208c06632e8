#include "collectives/group_state.h"

#include <utility>

#include <ATen/ATen.h>

#include "base/interruption.h"
#include "collectives/calls.h"
#include "collectives/core_types.h"
#include "collectives/device_engine.h"
#include "collectives/operand.h"
#include "collectives/operand_checks.h"
#include "collectives/operation_count.h"
#include "collectives/start_collective.h"
#include "collectives/work.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

// Every operation is checked here, converted to a form that all engines accept, numbered, and passed to the engine. On
// the CPU operations keep their dtype, which the engines compare; on a device, operations that only move data send
// bytes, so that every dtype works. Engines see contiguous tensors outside autograd; other tensors get their result by
// a copy in Work::wait.

namespace lockstep {
namespace {

std::vector<int64_t> with_rows(int64_t rows, at::IntArrayRef sizes) {
  std::vector<int64_t> shape = sizes.vec();
  shape.insert(shape.begin(), rows);
  return shape;
}

/// The tensor that an operation which only moves data passes to the engine: flat, as bytes for a device's engine.
at::Tensor moved(const at::Tensor& dense) { return dense.is_cpu() ? as_flat(dense) : as_bytes(dense); }
at::Tensor moved_rows(const at::Tensor& dense, int64_t rows) {
  const at::Tensor flat = moved(dense);
  return flat.view({rows, rows == 0 ? 0 : flat.numel() / rows});
}

void note_start(const Group::State& group, uint64_t sequence, const char* operation, const at::Tensor& tensor) {
  operations_started.add();
  const at::IntArrayRef sizes = tensor.sizes();
  own_page().start_operation(sequence, operation, dtype_name(tensor.scalar_type()), tensor.numel(), sizes.data(),
                             sizes.size(), coarse_now(), OperationLabel::current(), group.on_page.place());
}

/// `written` is the tensor that this rank's part writes; undefined if none. `what` and `message` are for errors.
Work start(const std::shared_ptr<Group::State>& group, const at::Tensor& tensor, const shm::Request& what,
           c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish, const at::Tensor& written = {},
           std::string message = "", MessageCounts::Message counted = {}) {
  if (written.defined()) note_written(written);
  const char* operation = CallGuard::operation(group->caller);
  note_start(*group, group->sequence, operation, tensor);
  RankStatus::Awaited awaited;
  const uint64_t device_call = std::exchange(group->device_call, 0);
  const bool compares_all = device_call != 0 || group->compares_all_calls();
  // An operation without elements sends nothing and is not counted on any rank.
  if (message.empty() && work)
    awaited = start_collective(group->on_page, group->rank, group->sequence, what, compares_all);
  return Work(std::make_shared<Work::State>(Work::State{.operation = operation,
                                                        .sequence = group->sequence++,
                                                        .call = call_now(what),
                                                        .group = group,
                                                        .work = std::move(work),
                                                        .finish = std::move(finish),
                                                        .message = std::move(message),
                                                        .counted = counted,
                                                        .device_call = device_call,
                                                        .awaited = awaited}));
}

/// Runs the operation in one call if the group's engine can; else returns false.
bool run_at_once(const std::shared_ptr<Group::State>& group, const at::Tensor& output, const at::Tensor& input,
                 shm::Request&& request) {
  const char* operation = CallGuard::operation(group->caller);
  if (group->blocking == nullptr || !is_plain(output) || !(input.is_same(output) || is_plain(input))) return false;
  request.input = input.const_data_ptr();
  request.output = output.mutable_data_ptr();
  if (request.kind != shm::OperationKind::kBroadcast || request.root != group->rank) note_written(output);
  const auto started = coarse_now();
  const uint64_t sequence = group->sequence++;
  // Sends nothing, as through c10d.
  if (request.count == 0 && request.kind != shm::OperationKind::kBarrier) return true;
  note_start(*group, sequence, operation, input);
  const auto awaited = start_collective(group->on_page, group->rank, sequence, request, group->compares_all_calls());
  const shm::Call call = call_now(request);
  try {
    const WaitOnPage waiting(group->on_page.place(), awaited);
    group->blocking->run(std::move(request));
    own_page().finish_operation(sequence);
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception& cause) {
    throw Error(describe_failure({.operation = operation,
                                  .sequence = sequence,
                                  .call = call,
                                  .group = group,
                                  .work = nullptr,
                                  .started = started},
                                 cause));
  }
  return true;
}

/// A reduction of `output`'s elements. A dtype that cannot be reduced goes through c10d, which refuses it.
bool reduce_at_once(const std::shared_ptr<Group::State>& group, const at::Tensor& output, const at::Tensor& input,
                    shm::OperationKind kind, ReduceOp op) {
  const auto type = to_core(output.scalar_type());
  return type &&
         run_at_once(group, output, input,
                     {.kind = kind, .type = *type, .op = to_core(op), .count = static_cast<size_t>(output.numel())});
}

}  // namespace

void Group::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  const CallGuard guard = state_->enter("all_reduce");
  check_tensor("all_reduce", "tensor", tensor);
  check_reduction("all_reduce", tensor, op);
  check_written("all_reduce", tensor);
  if (!reduce_at_once(state_, tensor, tensor, shm::OperationKind::kAllReduce, op)) all_reduce_async(tensor, op).wait();
}

Work Group::all_reduce_async(const at::Tensor& tensor, ReduceOp op) const {
  const CallGuard guard = state_->enter("all_reduce");
  check_tensor("all_reduce", "tensor", tensor);
  check_reduction("all_reduce", tensor, op);
  check_written("all_reduce", tensor);
  Operand operand(tensor);
  std::vector<at::Tensor> tensors{operand.dense};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  const shm::Request what = reducing(shm::OperationKind::kAllReduce, tensor, op);
  auto work = tensor.numel() == 0 ? nullptr : engine_for(*this, call_now(what), tensor).allreduce(tensors, options);
  return start(state_, tensor, what, std::move(work), operand.copy_back(), tensor);
}

void Group::broadcast(const at::Tensor& tensor, int root) const {
  const CallGuard guard = state_->enter("broadcast");
  check_tensor("broadcast", "tensor", tensor);
  check_written("broadcast", tensor);
  check_peer("broadcast", root);
  if (!run_at_once(state_, tensor, tensor, moving(shm::OperationKind::kBroadcast, tensor, root)))
    broadcast_async(tensor, root).wait();
}

Work Group::broadcast_async(const at::Tensor& tensor, int root) const {
  const CallGuard guard = state_->enter("broadcast");
  check_tensor("broadcast", "tensor", tensor);
  check_written("broadcast", tensor);
  check_peer("broadcast", root);
  Operand operand(tensor);
  std::vector<at::Tensor> tensors{moved(operand.dense)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  const shm::Request what = moving(shm::OperationKind::kBroadcast, tensor, root);
  auto work = tensor.numel() == 0 ? nullptr : engine_for(*this, call_now(what), tensor).broadcast(tensors, options);
  return start(state_, tensor, what, std::move(work), operand.copy_back(), rank() == root ? at::Tensor() : tensor);
}

Work Group::reduce_async(const at::Tensor& tensor, int root, ReduceOp op) const {
  const CallGuard guard = state_->enter("reduce");
  check_tensor("reduce", "tensor", tensor);
  check_reduction("reduce", tensor, op);
  check_peer("reduce", root);
  if (rank() == root) check_written("reduce", tensor);
  // Engines may use the other ranks' tensors as scratch space; Group promises to leave them unchanged.
  Operand operand(tensor);
  if (rank() != root) operand.dense = operand.dense.clone();
  std::vector<at::Tensor> tensors{operand.dense};
  c10d::ReduceOptions options;
  options.reduceOp = to_c10d(op);
  options.rootRank = root;
  const shm::Request what = reducing(shm::OperationKind::kReduce, tensor, op, root);
  auto work = tensor.numel() == 0 ? nullptr : engine_for(*this, call_now(what), tensor).reduce(tensors, options);
  return start(state_, tensor, what, std::move(work), rank() == root ? operand.copy_back() : nullptr,
               rank() == root ? tensor : at::Tensor());
}

at::Tensor Group::all_gather(const at::Tensor& input) const {
  const CallGuard guard = state_->enter("all_gather");
  check_tensor("all_gather", "input", input);
  auto output = at::empty(with_rows(world_size(), input.sizes()), input.options().requires_grad(false));
  all_gather_into_tensor(output, input);
  return output;
}

void Group::all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input) const {
  const CallGuard guard = state_->enter("all_gather");
  check_tensor("all_gather", "input", input);
  check_tensor("all_gather", "output", output);
  check_rows("all_gather", "output", output, input, world_size());
  check_written("all_gather", output);
  check_apart("all_gather", output, input, rank());
  if (!run_at_once(state_, output, input, moving(shm::OperationKind::kAllGather, input)))
    all_gather_async(output, input).wait();
}

Work Group::all_gather_async(const at::Tensor& output, const at::Tensor& input) const {
  const CallGuard guard = state_->enter("all_gather");
  check_tensor("all_gather", "input", input);
  check_tensor("all_gather", "output", output);
  check_rows("all_gather", "output", output, input, world_size());
  check_written("all_gather", output);
  check_apart("all_gather", output, input, rank());
  Operand rows(output);
  at::Tensor row_bytes = moved(Operand(input).dense), rows_bytes = moved(rows.dense);
  const shm::Request what = moving(shm::OperationKind::kAllGather, input);
  auto& engine = engine_for(*this, call_now(what), input, output);
  auto work = input.numel() == 0 ? nullptr : engine._allgather_base(rows_bytes, row_bytes, {});
  return start(state_, input, what, std::move(work), rows.copy_back(), output);
}

at::Tensor Group::gather(const at::Tensor& input, int root) const {
  const CallGuard guard = state_->enter("gather");
  check_tensor("gather", "input", input);
  at::Tensor output;
  if (rank() == root) output = at::empty(with_rows(world_size(), input.sizes()), input.options().requires_grad(false));
  gather_async(output, input, root).wait();
  return output;
}

Work Group::gather_async(const at::Tensor& output, const at::Tensor& input, int root) const {
  const CallGuard guard = state_->enter("gather");
  check_tensor("gather", "input", input);
  check_peer("gather", root);
  std::vector<at::Tensor> inputs{moved(Operand(input).dense)};
  std::vector<std::vector<at::Tensor>> outputs;
  std::function<void()> finish;
  if (rank() == root) {
    check_tensor("gather", "output", output);
    check_rows("gather", "output", output, input, world_size());
    check_written("gather", output);
    check_apart("gather", output, input, root);
    Operand rows(output);
    outputs.push_back(moved_rows(rows.dense, world_size()).unbind());
    finish = rows.copy_back();
  }
  c10d::GatherOptions options;
  options.rootRank = root;
  const shm::Request what = moving(shm::OperationKind::kGather, input, root);
  auto& engine = engine_for(*this, call_now(what), input, rank() == root ? output : input);
  auto work = input.numel() == 0 ? nullptr : engine.gather(outputs, inputs, options);
  return start(state_, input, what, std::move(work), std::move(finish), rank() == root ? output : at::Tensor());
}

Work Group::scatter_async(const at::Tensor& output, const at::Tensor& input, int root) const {
  const CallGuard guard = state_->enter("scatter");
  check_tensor("scatter", "output", output);
  check_peer("scatter", root);
  check_written("scatter", output);
  Operand row(output);
  std::vector<at::Tensor> outputs{moved(row.dense)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (rank() == root) {
    check_tensor("scatter", "input", input);
    check_rows("scatter", "input", input, output, world_size());
    check_apart("scatter", input, output, root);
    inputs.push_back(moved_rows(Operand(input).dense, world_size()).unbind());
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  const shm::Request what = moving(shm::OperationKind::kScatter, output, root);
  auto& engine = engine_for(*this, call_now(what), rank() == root ? input : output, output);
  auto work = output.numel() == 0 ? nullptr : engine.scatter(outputs, inputs, options);
  return start(state_, output, what, std::move(work), row.copy_back(), output);
}

at::Tensor Group::reduce_scatter(const at::Tensor& input, ReduceOp op) const {
  const CallGuard guard = state_->enter("reduce_scatter");
  check_tensor("reduce_scatter", "input", input);
  TORCH_CHECK(input.dim() > 0 && input.size(0) == world_size(),
              "reduce_scatter: the input must have one row for each of ", world_size(), " ranks; its shape is ",
              input.sizes());
  auto output = at::empty(input.sizes().slice(1), input.options().requires_grad(false));
  reduce_scatter_tensor(output, input, op);
  return output;
}

void Group::reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  const CallGuard guard = state_->enter("reduce_scatter");
  check_tensor("reduce_scatter", "input", input);
  check_tensor("reduce_scatter", "output", output);
  check_rows("reduce_scatter", "input", input, output, world_size());
  check_written("reduce_scatter", output);
  check_apart("reduce_scatter", input, output, rank());
  check_reduction("reduce_scatter", input, op);
  if (!reduce_at_once(state_, output, input, shm::OperationKind::kReduceScatter, op))
    reduce_scatter_async(output, input, op).wait();
}

Work Group::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op) const {
  const CallGuard guard = state_->enter("reduce_scatter");
  check_tensor("reduce_scatter", "input", input);
  check_tensor("reduce_scatter", "output", output);
  check_rows("reduce_scatter", "input", input, output, world_size());
  check_written("reduce_scatter", output);
  check_apart("reduce_scatter", input, output, rank());
  check_reduction("reduce_scatter", input, op);
  Operand row(output), rows(input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
  const shm::Request what = reducing(shm::OperationKind::kReduceScatter, output, op);
  auto& engine = engine_for(*this, call_now(what), input, output);
  auto work = output.numel() == 0 ? nullptr : engine._reduce_scatter_base(row.dense, rows.dense, options);
  return start(state_, output, what, std::move(work), row.copy_back(), output);
}

at::Tensor Group::all_to_all(const at::Tensor& input) const {
  const CallGuard guard = state_->enter("all_to_all");
  check_tensor("all_to_all", "input", input);
  auto output = at::empty(input.sizes(), input.options().requires_grad(false));
  all_to_all_async(output, input).wait();
  return output;
}

at::Tensor Group::all_to_all(const at::Tensor& input, std::vector<int64_t> input_splits,
                             std::vector<int64_t> output_splits) const {
  const CallGuard guard = state_->enter("all_to_all");
  check_tensor("all_to_all", "input", input);
  TORCH_CHECK(input.dim() > 0, "all_to_all: splits count rows, so the input must have at least one dimension");
  auto output = at::empty(with_rows(rows_of("output", output_splits), input.sizes().slice(1)),
                          input.options().requires_grad(false));
  all_to_all_async(output, input, std::move(input_splits), std::move(output_splits)).wait();
  return output;
}

Work Group::all_to_all_async(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> input_splits,
                             std::vector<int64_t> output_splits) const {
  const CallGuard guard = state_->enter("all_to_all");
  check_tensor("all_to_all", "input", input);
  check_tensor("all_to_all", "output", output);
  TORCH_CHECK(input.scalar_type() == output.scalar_type(), "all_to_all: the input is ", dtype_name(input.scalar_type()),
              ", the output is ", dtype_name(output.scalar_type()), "; give both the same dtype");
  check_written("all_to_all", output);
  check_apart("all_to_all", input, output, -1);
  const auto check_splits = [&](const char* role, const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    TORCH_CHECK(tensor.dim() > 0, "all_to_all: the ", role, " must have a dimension of rows");
    const int64_t sum = rows_of(role, splits);
    const bool even = splits.empty() && tensor.size(0) % world_size() == 0;
    const bool uneven = static_cast<int>(splits.size()) == world_size() && sum == tensor.size(0);
    TORCH_CHECK(even || uneven, "all_to_all: the ", role, " has ", tensor.size(0), " rows for ", world_size(),
                " ranks; give one split for each rank, so that they add up to its rows (", splits.size(),
                " splits add up to ", sum, ")");
  };
  check_splits("input", input, input_splits);
  check_splits("output", output, output_splits);
  Operand received(output);
  at::Tensor to = moved_rows(received.dense, output.size(0)), from = moved_rows(Operand(input).dense, input.size(0));
  const bool even = input_splits.empty() && output_splits.empty();
  shm::Request what = moving(even ? shm::OperationKind::kAllToAll : shm::OperationKind::kAllToAllUneven, input);
  what.count /= static_cast<size_t>(world_size());
  auto& engine = engine_for(*this, call_now(what), input, output);
  if (!even) compare_device_splits(*state_, {input, input_splits}, {output, output_splits});
  auto work = engine.alltoall_base(to, from, output_splits, input_splits, {});
  return start(state_, input, what, std::move(work), received.copy_back(), output);
}

Work Group::send_async(const at::Tensor& tensor, int destination, int tag) const {
  const CallGuard guard = state_->enter("send");
  check_tensor("send", "tensor", tensor);
  check_peer("send", destination);
  check_message("send", destination, tag, *this);
  // A device tensor goes through the CPU: the device's engine needs all ranks and has no tags.
  std::vector<at::Tensor> tensors{as_flat(on_cpu(Operand(tensor).dense))};
  // An empty message is sent, too: its receiver may expect another size.
  auto work = state_->backend->send(tensors, destination, tag);
  return start(state_, tensor, moving({}, tensor), std::move(work), nullptr, {}, message_name("to", destination, tag),
               state_->messages.count(world_size(), /*is_send=*/true, destination, tag));
}

Work Group::recv_async(const at::Tensor& tensor, int source, int tag) const {
  const CallGuard guard = state_->enter("recv");
  check_tensor("recv", "tensor", tensor);
  check_written("recv", tensor);
  check_peer("recv", source);
  check_message("recv", source, tag, *this);
  Operand operand(tensor);
  if (!tensor.is_cpu()) operand.dense = at::empty_like(operand.dense, operand.dense.options().device(at::kCPU));
  std::vector<at::Tensor> tensors{as_flat(operand.dense)};
  auto work = state_->backend->recv(tensors, source, tag);
  return start(state_, tensor, moving({}, tensor), std::move(work), operand.copy_back(), tensor,
               message_name("from", source, tag), state_->messages.count(world_size(), /*is_send=*/false, source, tag));
}

void Group::barrier() const {
  const CallGuard guard = state_->enter("barrier");
  if (state_->blocking == nullptr) return barrier_async().wait();
  const at::Tensor nothing = at::empty({0});
  run_at_once(state_, nothing, nothing, {.kind = shm::OperationKind::kBarrier});
}

Work Group::barrier_async() const {
  const CallGuard guard = state_->enter("barrier");
  return start(state_, at::empty({0}), {.kind = shm::OperationKind::kBarrier}, state_->backend->barrier({}), nullptr);
}

}  // namespace lockstep
