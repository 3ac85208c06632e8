#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/shm/backend/backend_class.h"

namespace lockstep::shm_engine {

using c10d::OpType;
using shm::OperationKind;

void ShmBackend::add_all_reduce(Task& task, const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  auto request = task.reducing(OperationKind::kAllReduce, tensor.scalar_type(), tensor.numel(), op);
  request.input = request.output = task.output(tensor, /*load=*/true);
  task.requests.push_back(std::move(request));
  task.result.push_back(tensor);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::Tensor& tensor = only("all_reduce", tensors);
  if (tensor.layout() != at::kStrided) return all_reduce_sparse(tensor, options);
  check_dense("all_reduce", tensor);
  Task task(OpType::ALLREDUCE, "lockstep:all_reduce", options);
  task.inputs = tensors;
  add_all_reduce(task, tensor, options.reduceOp);
  return launch(std::move(task));
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return all_reduce_sparse(only("all_reduce", tensors), options);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Task task(OpType::ALLREDUCE_COALESCED, "lockstep:all_reduce", options);
  task.inputs = tensors;
  for (const auto& tensor : tensors) check_dense("all_reduce_coalesced", tensor);
  for (const auto& tensor : tensors) add_all_reduce(task, tensor, options.reduceOp);
  return launch(std::move(task));
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  check_dense("reduce", tensor);
  Task task(OpType::REDUCE, "lockstep:reduce", options);
  task.inputs = task.result = tensors;
  auto request = task.reducing(OperationKind::kReduce, tensor.scalar_type(), tensor.numel(), options.reduceOp);
  request.root = static_cast<int>(options.rootRank);
  const bool root = options.rootRank == getRank();
  request.input = root ? task.output(tensor, /*load=*/true) : task.input(tensor);
  if (root) request.output = const_cast<void*>(request.input);
  task.requests.push_back(std::move(request));
  return launch(std::move(task));
}

void ShmBackend::add_reduce_scatter(Task& task, const at::Tensor& output, const at::Tensor& input,
                                    const c10d::ReduceOp& op) const {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize() && input.scalar_type() == output.scalar_type(),
                    "reduce_scatter: the input must hold one output for each of ", getSize(), " ranks; it has ",
                    input.numel(), " elements of ", input.scalar_type(), " for outputs of ", output.numel(), " of ",
                    output.scalar_type());
  auto request = task.reducing(OperationKind::kReduceScatter, output.scalar_type(), output.numel(), op);
  request.input = task.input(input);
  request.output = task.output(output, /*load=*/false);
  task.requests.push_back(std::move(request));
  task.result.push_back(output);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& parts = only("reduce_scatter", inputs);
  check_dense("reduce_scatter", output);
  check_dense("reduce_scatter", parts);
  TORCH_CHECK_VALUE(parts.size() == ranks(), "reduce_scatter: needs one input tensor for each of ", getSize(),
                    " ranks, not ", parts.size());
  Task task(OpType::REDUCE_SCATTER, "lockstep:reduce_scatter", options);
  task.inputs = parts;
  task.result = outputs;
  auto request = task.reducing(OperationKind::kReduceScatter, output.scalar_type(), output.numel(), options.reduceOp);
  for (const auto& part : parts) {
    TORCH_CHECK_VALUE(part.numel() == output.numel() && part.scalar_type() == output.scalar_type(),
                      "reduce_scatter: an input has ", part.numel(), " elements of ", part.scalar_type(),
                      ", the output ", output.numel(), " of ", output.scalar_type());
    request.make_pieces().inputs.push_back(task.input(part));
  }
  request.output = task.output(output, /*load=*/false);
  task.requests.push_back(std::move(request));
  return launch(std::move(task));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  check_dense("reduce_scatter_tensor", output);
  check_dense("reduce_scatter_tensor", input);
  Task task(OpType::_REDUCE_SCATTER_BASE, "lockstep:_reduce_scatter_base", options);
  task.inputs = {input};
  add_reduce_scatter(task, output, input, options.reduceOp);
  return launch(std::move(task));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  Task task(OpType::COALESCED, "lockstep:reduce_scatter_tensor_coalesced", options);
  task.inputs = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense("reduce_scatter_tensor_coalesced", outputs[i]);
    check_dense("reduce_scatter_tensor_coalesced", inputs[i]);
    add_reduce_scatter(task, outputs[i], inputs[i], options.reduceOp);
  }
  return launch(std::move(task));
}

at::Tensor ShmBackend::gather_rows(const at::Tensor& row, std::chrono::milliseconds timeout) {
  std::vector<int64_t> shape{getSize()};
  shape.insert(shape.end(), row.sizes().begin(), row.sizes().end());
  at::Tensor rows = at::empty(shape, row.options()), input = row;
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  _allgather_base(rows, input, options)->wait();
  return rows;
}

ShmBackend::WorkPtr ShmBackend::all_reduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  // Ranks hold different numbers of elements, so this takes three exchanges, and waits for them.
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse && tensor.device().is_cpu(),
                    "all_reduce: takes dense and sparse COO tensors on the CPU, not ", tensor.layout());
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "all_reduce: sparse tensors can be summed only");
  at::NoGradGuard no_grad;
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor counts = gather_rows(at::scalar_tensor(mine._nnz(), at::kLong), options.timeout);
  const int64_t most = counts.max().item<int64_t>();
  const auto padded = [&](const at::Tensor& some, int64_t dim) {
    auto shape = some.sizes().vec();
    shape[static_cast<size_t>(dim)] = most - some.size(dim);
    return at::cat({some, at::zeros(shape, some.options())}, dim);
  };
  const at::Tensor indices = gather_rows(padded(mine._indices(), 1), options.timeout);
  const at::Tensor values = gather_rows(padded(mine._values(), 0), options.timeout);
  at::Tensor sum;
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto count = counts[rank].item<int64_t>();
    const at::Tensor theirs = at::sparse_coo_tensor(indices[rank].narrow(1, 0, count), values[rank].narrow(0, 0, count),
                                                    mine.sizes(), mine.options());
    sum = sum.defined() ? sum + theirs : theirs;
  }
  tensor.copy_(sum.coalesce());
  Task task(OpType::_ALLREDUCE_SPARSE, "lockstep:all_reduce", options);
  task.result = {tensor};
  return launch(std::move(task));
}

}  // namespace lockstep::shm_engine
