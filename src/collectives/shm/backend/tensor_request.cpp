#include "collectives/shm/backend/tensor_request.h"

#include <cstring>

#include <ATen/ATen.h>

#include "collectives/called_as.h"
#include "collectives/core_types.h"
#include "collectives/operand.h"
#include "collectives/operand_checks.h"

namespace lockstep::shm_engine {
namespace {

double premultiplier(const c10d::ReduceOp& op) {
  // c10d has kept this name in every release.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "PREMUL_SUM needs a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

}  // namespace

void* TensorRequest::input(const at::Tensor& tensor) {
  tensors.push_back(is_plain(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous());
  return tensors.back().data_ptr();
}

void* TensorRequest::output(const at::Tensor& tensor, bool load) {
  check_written(std::strchr(title, ':') + 1, tensor);
  if (is_plain(tensor)) {
    tensors.push_back(tensor);
  } else {
    if (load)
      input(tensor);
    else
      tensors.push_back(at::empty(tensor.sizes(), tensor.options().requires_grad(false)));
    finish.emplace_back([original = tensor.detach(), dense = tensors.back()] { original.copy_(dense); });
  }
  return tensors.back().data_ptr();
}

shm::Request TensorRequest::moving(shm::OperationKind kind, at::ScalarType dtype, int64_t elements) const {
  shm::Request part;
  part.kind = kind;
  part.type = to_moved(dtype);
  part.count = static_cast<size_t>(elements) * (at::elementSize(dtype) / shm::element_bytes(part.type));
  part.called_as = called_as;
  return part;
}

shm::Request TensorRequest::reducing(shm::OperationKind kind, at::ScalarType dtype, int64_t elements,
                                     const c10d::ReduceOp& op) const {
  TORCH_CHECK_TYPE(to_core(dtype), shm::name(kind), ": ", dtype, " tensors cannot be reduced; convert them first");
  shm::Request part = moving(kind, dtype, elements);
  part.op = to_core(op);
  if (part.op == shm::ReduceOp::kPremulSum) part.factor = premultiplier(op);
  return part;
}

void check_dense(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": undefined tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), operation, ": shared memory holds CPU tensors only; this one is on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, operation, ": takes dense tensors; this one is ", tensor.layout());
}

void check_dense(const char* operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), operation, ": the list of tensors is empty");
  for (const auto& tensor : tensors) {
    check_dense(operation, tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(), operation,
                      ": the tensors of a list must have the same dtype, not ", tensors[0].scalar_type(), " and ",
                      tensor.scalar_type());
  }
}

}  // namespace lockstep::shm_engine
