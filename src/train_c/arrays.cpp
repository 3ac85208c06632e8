#include "train_c/arrays.h"

#include <optional>
#include <sstream>

#include <ATen/ATen.h>

#include "train_c/guarded.h"

namespace lockstep::train_c {
namespace {

constexpr int32_t kMostDimensions = 64;
constexpr int32_t kMostArrays = 4096;

std::optional<at::ScalarType> scalar_type(lockstep_dtype dtype) {
  switch (dtype) {
    case LOCKSTEP_FLOAT32:
      return at::kFloat;
    case LOCKSTEP_FLOAT64:
      return at::kDouble;
    case LOCKSTEP_FLOAT16:
      return at::kHalf;
    case LOCKSTEP_BFLOAT16:
      return at::kBFloat16;
    case LOCKSTEP_INT8:
      return at::kChar;
    case LOCKSTEP_UINT8:
      return at::kByte;
    case LOCKSTEP_INT16:
      return at::kShort;
    case LOCKSTEP_INT32:
      return at::kInt;
    case LOCKSTEP_INT64:
      return at::kLong;
    default:
      return std::nullopt;
  }
}

const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    default:
      return at::toString(type);
  }
}

std::string shape_text(at::IntArrayRef shape, bool any_rows) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i == 0 ? "" : ", ") + (any_rows && i == 0 ? "*" : std::to_string(shape[i]));
  return text + "]";
}

at::Tensor view_of(const char* function, const std::string& name, const lockstep_train_array& array) {
  const std::optional<at::ScalarType> type = scalar_type(array.dtype);
  if (!type) refuse(function, name + ".dtype is " + std::to_string(array.dtype) + ", which is not a lockstep_dtype");
  if (array.dimensions < 0 || array.dimensions > kMostDimensions)
    refuse(function, name + ".dimensions is " + std::to_string(array.dimensions) + "; give 0 to " +
                         std::to_string(kMostDimensions));
  if (array.dimensions > 0 && array.shape == nullptr) refuse(function, name + ".shape is null");
  const at::IntArrayRef shape(array.shape, static_cast<size_t>(array.dimensions));
  int64_t bytes = static_cast<int64_t>(c10::elementSize(*type));
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) refuse(function, name + ".shape is " + shape_text(shape, false) + "; sizes must not be negative");
    is_empty |= size == 0;
  }
  for (const int64_t size : shape)
    if (!is_empty && __builtin_mul_overflow(bytes, size, &bytes))
      refuse(function, name + ".shape is " + shape_text(shape, false) + ", more than memory can hold");
  if (is_empty) return at::empty(shape, *type);
  if (array.data == nullptr) refuse(function, name + ".data is null");
  return at::from_blob(array.data, shape, at::TensorOptions(*type));
}

}  // namespace

Arrays::Arrays(const char* function, const char* name, const lockstep_train_array* arrays, int32_t count)
    : name_(name) {
  if (count < 0 || count > kMostArrays)
    refuse(function,
           "the number of " + name_ + " is " + std::to_string(count) + "; give 0 to " + std::to_string(kMostArrays));
  if (count > 0 && arrays == nullptr) refuse(function, name_ + " is null");
  for (int32_t i = 0; i < count; ++i)
    views_.push_back(view_of(function, name_ + "[" + std::to_string(i) + "]", arrays[i]));
}

std::vector<at::Tensor> Arrays::copies() const {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& view : views_) copies.push_back(view.clone());
  return copies;
}

std::string Arrays::text(bool any_rows) const {
  std::string text;
  for (size_t i = 0; i < views_.size(); ++i)
    text += name_ + "[" + std::to_string(i) + "] " + dtype_name(views_[i].scalar_type()) + " " +
            shape_text(views_[i].sizes(), any_rows) + "\n";
  return text;
}

int64_t Arrays::rows() const { return views_.empty() || views_[0].dim() == 0 ? 1 : views_[0].size(0); }

void Arrays::write(const char* function, const std::vector<at::Tensor>& results) const {
  if (results.size() != views_.size())
    refuse(function, "the module returns " + std::to_string(results.size()) + " tensors, but there are " +
                         std::to_string(views_.size()) + " " + name_);
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].scalar_type() != views_[i].scalar_type() || results[i].sizes() != views_[i].sizes())
      refuse(function, name_ + "[" + std::to_string(i) + "] is " + text_of(views_[i]) + ", but the module returns " +
                           text_of(results[i]));
  for (size_t i = 0; i < results.size(); ++i) views_[i].copy_(results[i]);
}

std::string text_of(const at::Tensor& tensor) {
  return std::string(dtype_name(tensor.scalar_type())) + " " + shape_text(tensor.sizes(), false);
}

std::vector<at::Tensor> tensors_of(const std::string& function, const c10::IValue& result) {
  std::vector<at::Tensor> tensors;
  if (result.isTensor()) {
    tensors.push_back(result.toTensor());
  } else if (result.isTensorList()) {
    tensors = result.toTensorVector();
  } else if (result.isTuple()) {
    for (const c10::IValue& element : result.toTupleRef().elements()) {
      if (!element.isTensor())
        refuse(function, "the module returns a tuple with a " + element.tagKind() + "; it must return tensors");
      tensors.push_back(element.toTensor());
    }
  } else {
    refuse(function,
           "the module returns a " + result.tagKind() + "; it must return a tensor, or a tuple or list of them");
  }
  for (const at::Tensor& tensor : tensors)
    if (!tensor.defined()) refuse(function, "the module returns an undefined tensor");
  return tensors;
}

}  // namespace lockstep::train_c
