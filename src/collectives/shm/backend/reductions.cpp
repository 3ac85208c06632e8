#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/operand_checks.h"
#include "collectives/root_rank.h"
#include "collectives/shm/backend/request_backend.h"

namespace lockstep::shm_engine {

using c10d::OpType;
using shm::OperationKind;

void RequestBackend::add_all_reduce(TensorRequest& request, const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  auto part = request.reducing(OperationKind::kAllReduce, tensor.scalar_type(), tensor.numel(), op);
  part.input = part.output = request.output(tensor, /*load=*/true);
  request.parts.push_back(std::move(part));
  request.result.push_back(tensor);
}

RequestBackend::WorkPtr RequestBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::Tensor& tensor = only("all_reduce", tensors);
  if (tensor.layout() != at::kStrided) return all_reduce_sparse(tensor, options);
  check_dense("all_reduce", tensor);
  TensorRequest request(OpType::ALLREDUCE, "lockstep:all_reduce", options);
  request.inputs = tensors;
  add_all_reduce(request, tensor, options.reduceOp);
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return all_reduce_sparse(only("all_reduce", tensors), options);
}

RequestBackend::WorkPtr RequestBackend::allreduce_coalesced(Tensors& tensors,
                                                            const c10d::AllreduceCoalescedOptions& options) {
  TensorRequest request(OpType::ALLREDUCE_COALESCED, "lockstep:all_reduce", options);
  request.inputs = tensors;
  for (const auto& tensor : tensors) check_dense("all_reduce_coalesced", tensor);
  for (const auto& tensor : tensors) add_all_reduce(request, tensor, options.reduceOp);
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  check_dense("reduce", tensor);
  TensorRequest request(OpType::REDUCE, "lockstep:reduce", options);
  request.inputs = request.result = tensors;
  auto part = request.reducing(OperationKind::kReduce, tensor.scalar_type(), tensor.numel(), options.reduceOp);
  part.root = root_rank("reduce", options.rootRank, getSize());
  const bool root = options.rootRank == getRank();
  part.input = root ? request.output(tensor, /*load=*/true) : request.input(tensor);
  if (root) part.output = const_cast<void*>(part.input);
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

void RequestBackend::add_reduce_scatter(TensorRequest& request, const at::Tensor& output, const at::Tensor& input,
                                        const c10d::ReduceOp& op) const {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize() && input.scalar_type() == output.scalar_type(),
                    "reduce_scatter: the input must hold one output for each of ", getSize(), " ranks; it has ",
                    input.numel(), " elements of ", input.scalar_type(), " for outputs of ", output.numel(), " of ",
                    output.scalar_type());
  check_apart("reduce_scatter", input, output, getRank());
  auto part = request.reducing(OperationKind::kReduceScatter, output.scalar_type(), output.numel(), op);
  part.input = request.input(input);
  part.output = request.output(output, /*load=*/false);
  request.parts.push_back(std::move(part));
  request.result.push_back(output);
}

/// Blocks of different sizes: a reduction to each rank, of its block.
RequestBackend::WorkPtr RequestBackend::reduce_scatter_uneven(TensorRequest request, const at::Tensor& output,
                                                              const Tensors& blocks, const c10d::ReduceOp& op) {
  for (int root = 0; root < getSize(); ++root) {
    const at::Tensor& block = blocks[static_cast<size_t>(root)];
    auto part = request.reducing(OperationKind::kReduce, block.scalar_type(), block.numel(), op);
    part.root = root;
    if (root == getRank()) {
      at::NoGradGuard no_grad;
      output.copy_(block.reshape(output.sizes()));
      part.input = request.output(output, /*load=*/true);
      part.output = const_cast<void*>(part.input);
    } else {
      part.input = request.input(block);
    }
    request.parts.push_back(std::move(part));
  }
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  const Tensors& blocks = only("reduce_scatter", inputs);
  check_dense("reduce_scatter", output);
  check_dense("reduce_scatter", blocks);
  TORCH_CHECK_VALUE(blocks.size() == ranks(), "reduce_scatter: needs one input tensor for each of ", getSize(),
                    " ranks, not ", blocks.size());
  TensorRequest request(OpType::REDUCE_SCATTER, "lockstep:reduce_scatter", options);
  request.inputs = blocks;
  request.result = outputs;
  check_lists_apart("reduce_scatter", outputs, blocks, 0, static_cast<size_t>(getRank()));
  const at::Tensor& own = blocks[static_cast<size_t>(getRank())];
  TORCH_CHECK_VALUE(own.numel() == output.numel(), "reduce_scatter: the input for this rank has ", own.numel(),
                    " elements, the output ", output.numel());
  bool is_even = true;
  for (const auto& block : blocks) {
    TORCH_CHECK_VALUE(block.scalar_type() == output.scalar_type(), "reduce_scatter: an input is of ",
                      block.scalar_type(), ", the output of ", output.scalar_type());
    is_even = is_even && block.numel() == output.numel();
  }
  if (!is_even) return reduce_scatter_uneven(std::move(request), output, blocks, options.reduceOp);
  auto part = request.reducing(OperationKind::kReduceScatter, output.scalar_type(), output.numel(), options.reduceOp);
  for (const auto& block : blocks) part.make_pieces().inputs.push_back(request.input(block));
  part.output = request.output(output, /*load=*/false);
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::ReduceScatterOptions& options) {
  check_dense("reduce_scatter_tensor", output);
  check_dense("reduce_scatter_tensor", input);
  TensorRequest request(OpType::_REDUCE_SCATTER_BASE, "lockstep:_reduce_scatter_base", options);
  request.inputs = {input};
  add_reduce_scatter(request, output, input, options.reduceOp);
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  TensorRequest request(OpType::COALESCED, "lockstep:reduce_scatter_tensor_coalesced", options);
  request.inputs = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense("reduce_scatter_tensor_coalesced", outputs[i]);
    check_dense("reduce_scatter_tensor_coalesced", inputs[i]);
    add_reduce_scatter(request, outputs[i], inputs[i], options.reduceOp);
  }
  return launch(std::move(request));
}

at::Tensor RequestBackend::gather_rows(const at::Tensor& row, std::chrono::milliseconds timeout) {
  std::vector<int64_t> shape{getSize()};
  shape.insert(shape.end(), row.sizes().begin(), row.sizes().end());
  at::Tensor rows = at::empty(shape, row.options()), input = row;
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  _allgather_base(rows, input, options)->wait();
  return rows;
}

RequestBackend::WorkPtr RequestBackend::all_reduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  // Ranks hold different numbers of elements, so this takes three exchanges, and waits for each.
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse && tensor.device().is_cpu(),
                    "all_reduce: takes dense and sparse COO tensors on the CPU, not ", tensor.layout());
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "all_reduce: sparse tensors can only be summed");
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
  TensorRequest request(OpType::_ALLREDUCE_SPARSE, "lockstep:all_reduce", options);
  request.result = {tensor};
  return launch(std::move(request));
}

}  // namespace lockstep::shm_engine
