#include <ATen/ATen.h>

#include "collectives/operand_checks.h"
#include "collectives/root_rank.h"
#include "collectives/shm/backend/request_backend.h"

namespace lockstep::shm_engine {

using c10d::OpType;
using shm::OperationKind;

namespace {

void check_like(const char* operation, const at::Tensor& tensor, const at::Tensor& model) {
  TORCH_CHECK_VALUE(tensor.numel() == model.numel() && tensor.scalar_type() == model.scalar_type(), operation,
                    ": all tensors must have the same size and dtype; one has ", tensor.numel(), " elements of ",
                    tensor.scalar_type(), ", another ", model.numel(), " of ", model.scalar_type());
}

}  // namespace

RequestBackend::WorkPtr RequestBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only("broadcast", tensors);
  check_dense("broadcast", tensor);
  TensorRequest request(OpType::BROADCAST, "lockstep:broadcast", options);
  request.inputs = request.result = tensors;
  auto part = request.moving(OperationKind::kBroadcast, tensor.scalar_type(), tensor.numel());
  part.root = root_rank("broadcast", options.rootRank, getSize());
  const bool root = options.rootRank == getRank();
  part.output = root ? request.input(tensor) : request.output(tensor, /*load=*/false);
  part.input = part.output;
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

void RequestBackend::add_all_gather(TensorRequest& request, const at::Tensor& output, const at::Tensor& input) const {
  TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
                    "all_gather: the output must hold one input for each of ", getSize(), " ranks; it has ",
                    output.numel(), " elements of ", output.scalar_type(), " for inputs of ", input.numel(), " of ",
                    input.scalar_type());
  check_apart("all_gather", output, input, getRank());
  auto part = request.moving(OperationKind::kAllGather, input.scalar_type(), input.numel());
  part.input = request.input(input);
  part.output = request.output(output, /*load=*/false);
  request.parts.push_back(std::move(part));
  request.result.push_back(output);
}

void RequestBackend::add_all_gather(TensorRequest& request, const Tensors& outputs, const at::Tensor& input) const {
  TORCH_CHECK_VALUE(outputs.size() == ranks(), "all_gather: needs one output for each of ", getSize(), " ranks, not ",
                    outputs.size());
  check_lists_apart("all_gather", outputs, {input}, static_cast<size_t>(getRank()), 0);
  auto part = request.moving(OperationKind::kAllGather, input.scalar_type(), input.numel());
  part.input = request.input(input);
  for (const auto& output : outputs) {
    check_dense("all_gather", output);
    check_like("all_gather", output, input);
    part.make_pieces().outputs.push_back(request.output(output, /*load=*/false));
  }
  request.parts.push_back(std::move(part));
  request.result.insert(request.result.end(), outputs.begin(), outputs.end());
}

RequestBackend::WorkPtr RequestBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  check_dense("all_gather", input);
  TensorRequest request(OpType::ALLGATHER, "lockstep:all_gather", options);
  request.inputs = inputs;
  add_all_gather(request, only("all_gather", outputs), input);
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  check_dense("all_gather_into_tensor", output);
  check_dense("all_gather_into_tensor", input);
  TensorRequest request(OpType::_ALLGATHER_BASE, "lockstep:_all_gather_base", options);
  request.inputs = {input};
  add_all_gather(request, output, input);
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == ranks(), "all_gather_coalesced: needs one output list for each of ", getSize(),
                    " ranks, not ", outputs.size());
  TensorRequest request(OpType::ALLGATHER_COALESCED, "lockstep:all_gather", options);
  request.inputs = inputs;
  for (const auto& list : outputs)
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: an output list has ", list.size(),
                      " tensors for ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors row;
    for (const auto& list : outputs) row.push_back(list[i]);
    check_dense("all_gather_coalesced", inputs[i]);
    add_all_gather(request, row, inputs[i]);
  }
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced: ", outputs.size(),
                    " outputs for ", inputs.size(), " inputs");
  TensorRequest request(OpType::COALESCED, "lockstep:all_gather_into_tensor_coalesced", options);
  request.inputs = inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense("all_gather_into_tensor_coalesced", outputs[i]);
    check_dense("all_gather_into_tensor_coalesced", inputs[i]);
    add_all_gather(request, outputs[i], inputs[i]);
  }
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  check_dense("gather", input);
  TensorRequest request(OpType::GATHER, "lockstep:gather", options);
  request.inputs = inputs;
  auto part = request.moving(OperationKind::kGather, input.scalar_type(), input.numel());
  part.root = root_rank("gather", options.rootRank, getSize());
  part.input = request.input(input);
  if (options.rootRank == getRank()) {
    const Tensors& blocks = only("gather", outputs);
    TORCH_CHECK_VALUE(blocks.size() == ranks(), "gather: needs one output for each of ", getSize(), " ranks, not ",
                      blocks.size());
    check_lists_apart("gather", blocks, inputs, static_cast<size_t>(getRank()), 0);
    for (const auto& block : blocks) {
      check_dense("gather", block);
      check_like("gather", block, input);
      part.make_pieces().outputs.push_back(request.output(block, /*load=*/false));
    }
    request.result = blocks;
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "gather: only the root has outputs");
  }
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  check_dense("scatter", output);
  TensorRequest request(OpType::SCATTER, "lockstep:scatter", options);
  request.result = outputs;
  auto part = request.moving(OperationKind::kScatter, output.scalar_type(), output.numel());
  part.root = root_rank("scatter", options.rootRank, getSize());
  if (options.rootRank == getRank()) {
    const Tensors& blocks = only("scatter", inputs);
    TORCH_CHECK_VALUE(blocks.size() == ranks(), "scatter: needs one input for each of ", getSize(), " ranks, not ",
                      blocks.size());
    check_lists_apart("scatter", outputs, blocks, 0, static_cast<size_t>(getRank()));
    for (const auto& block : blocks) {
      check_dense("scatter", block);
      check_like("scatter", block, output);
      part.make_pieces().inputs.push_back(request.input(block));
    }
    request.inputs = blocks;
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "scatter: only the root has inputs");
  }
  part.output = request.output(output, /*load=*/false);
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& options) {
  check_dense("all_to_all_single", output);
  check_dense("all_to_all_single", input);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all_single: input and output differ in dtype");
  check_apart("all_to_all_single", input, output, -1);
  TensorRequest request(OpType::ALLTOALL_BASE, "lockstep:all_to_all", options);
  request.inputs = {input};
  request.result = {output};
  const bool even = output_splits.empty() && input_splits.empty();
  auto part = request.moving(even ? OperationKind::kAllToAll : OperationKind::kAllToAllUneven, input.scalar_type(),
                             input.numel() / getSize());
  if (even) {
    TORCH_CHECK_VALUE(output.numel() == input.numel() && (input.dim() == 0 || input.size(0) % getSize() == 0),
                      "all_to_all_single: ", input.sizes(), " cannot be split evenly among ", getSize(),
                      " ranks into an output of ", output.sizes());
  } else {
    c10d::checkSplitSizes(input_splits, input, getSize());
    c10d::checkSplitSizes(output_splits, output, getSize());
    const auto counts = [&](const std::vector<int64_t>& splits, const at::Tensor& tensor) {
      const int64_t rows = tensor.size(0), row = rows == 0 ? 0 : tensor.numel() / rows;
      const size_t unit = tensor.element_size() / shm::element_bytes(part.type);
      std::vector<size_t> elements(ranks(), static_cast<size_t>(rows / getSize() * row) * unit);
      for (size_t r = 0; r < splits.size(); ++r) elements[r] = static_cast<size_t>(splits[r] * row) * unit;
      return elements;
    };
    part.make_pieces().send_counts = counts(input_splits, input);
    part.make_pieces().receive_counts = counts(output_splits, output);
  }
  part.input = request.input(input);
  part.output = request.output(output, /*load=*/false);
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

RequestBackend::WorkPtr RequestBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == ranks() && inputs.size() == ranks(),
                    "all_to_all: needs one input and one output for each of ", getSize(), " ranks, not ", inputs.size(),
                    " and ", outputs.size());
  check_dense("all_to_all", outputs);
  check_dense("all_to_all", inputs);
  TORCH_CHECK_VALUE(outputs[0].scalar_type() == inputs[0].scalar_type(),
                    "all_to_all: inputs and outputs differ in dtype");
  check_lists_apart("all_to_all", outputs, inputs, static_cast<size_t>(getRank()), static_cast<size_t>(getRank()));
  TensorRequest request(OpType::ALLTOALL, "lockstep:all_to_all", options);
  request.inputs = inputs;
  request.result = outputs;
  auto part = request.moving(OperationKind::kAllToAllUneven, inputs[0].scalar_type(), 0);
  const auto count = [&](const at::Tensor& tensor) {
    return request.moving(OperationKind::kAllToAllUneven, tensor.scalar_type(), tensor.numel()).count;
  };
  shm::Pieces& pieces = part.make_pieces();
  for (size_t r = 0; r < ranks(); ++r) {
    pieces.inputs.push_back(request.input(inputs[r]));
    pieces.outputs.push_back(request.output(outputs[r], /*load=*/false));
    pieces.send_counts.push_back(count(inputs[r]));
    pieces.receive_counts.push_back(count(outputs[r]));
  }
  request.parts.push_back(std::move(part));
  return launch(std::move(request));
}

}  // namespace lockstep::shm_engine
