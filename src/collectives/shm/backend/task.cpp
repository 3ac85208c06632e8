#include "collectives/shm/backend/task.h"

#include <ATen/ATen.h>

#include "collectives/called_as.h"
#include "collectives/operand.h"

namespace lockstep::shm_engine {

using shm::DataType;

std::optional<DataType> data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kChar:
      return DataType::kInt8;
    case at::kByte:
      return DataType::kUInt8;
    case at::kShort:
      return DataType::kInt16;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kBool:
      return DataType::kBool;
    case at::kComplexFloat:
      return DataType::kComplex64;
    case at::kComplexDouble:
      return DataType::kComplex128;
    default:
      return std::nullopt;
  }
}

namespace {

shm::ReduceOp reduce_op(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return shm::ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return shm::ReduceOp::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return shm::ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return shm::ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return shm::ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return shm::ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return shm::ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return shm::ReduceOp::kBitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return shm::ReduceOp::kPremulSum;
    default:
      TORCH_CHECK_VALUE(false, "unknown reduce op ", static_cast<int>(op.op_));
  }
}

double premultiplier(const c10d::ReduceOp& op) {
  // The name it has had in all releases.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "PREMUL_SUM comes without a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

}  // namespace

void* Task::input(const at::Tensor& tensor) {
  tensors.push_back(is_plain(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous());
  return tensors.back().data_ptr();
}

void* Task::output(const at::Tensor& tensor, bool load) {
  if (is_plain(tensor)) {
    tensors.push_back(tensor);
  } else {
    if (load)
      input(tensor);
    else
      tensors.push_back(at::empty(tensor.sizes(), tensor.options().requires_grad(false)));
    finish.emplace_back([home = tensor.detach(), dense = tensors.back()] { home.copy_(dense); });
  }
  return tensors.back().data_ptr();
}

shm::Request Task::moving(shm::OperationKind kind, at::ScalarType dtype, int64_t elements) const {
  shm::Request request;
  request.kind = kind;
  const auto known = data_type(dtype);
  request.type = known.value_or(DataType::kUInt8);
  request.count = static_cast<size_t>(elements) * (known ? 1 : at::elementSize(dtype));
  request.called_as = called_as;
  return request;
}

shm::Request Task::reducing(shm::OperationKind kind, at::ScalarType dtype, int64_t elements,
                            const c10d::ReduceOp& op) const {
  TORCH_CHECK_TYPE(data_type(dtype), title, ": ", dtype, " tensors cannot be reduced; convert them first");
  shm::Request request = moving(kind, dtype, elements);
  request.op = reduce_op(op);
  if (request.op == shm::ReduceOp::kPremulSum) request.factor = premultiplier(op);
  return request;
}

void check_dense(const char* operation, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": undefined tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), operation, ": shared memory moves CPU tensors, this one is on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, operation, ": takes dense tensors, this one is ", tensor.layout());
}

void check_dense(const char* operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), operation, ": the list of tensors is empty");
  for (const auto& tensor : tensors) {
    check_dense(operation, tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(), operation,
                      ": the tensors of a list must have one dtype, not ", tensors[0].scalar_type(), " and ",
                      tensor.scalar_type());
  }
}

}  // namespace lockstep::shm_engine
