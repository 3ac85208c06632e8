#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <lockstep/train_c.h>

namespace lockstep::train_c {

/// Arrays of the program that were checked: no pointer is null, and dtypes and shapes make sense.
class Arrays {
 public:
  /// Throws LOCKSTEP_INVALID_ARGUMENT. `name` is the parameter's, for texts: "inputs".
  Arrays(const char* function, const char* name, const lockstep_train_array* arrays, int32_t count);

  size_t size() const { return views_.size(); }
  /// Copies of the arrays.
  std::vector<at::Tensor> copies() const;
  /// Lines such as "inputs[0] float32 [8, 3]". With `any_rows` the first dimension is a star.
  std::string text(bool any_rows) const;
  /// The first dimension of the first array; 1 if it has none.
  int64_t rows() const;
  /// Writes results into the arrays. Throws LOCKSTEP_INVALID_ARGUMENT, before anything is written, if shapes or dtypes
  /// differ.
  void write(const char* function, const std::vector<at::Tensor>& results) const;

 private:
  std::string name_;
  std::vector<at::Tensor> views_;  ///< of the program's memory
};

/// "float32 [8, 3]".
std::string text_of(const at::Tensor& tensor);

/// The tensors of what a module returned: a tensor, or a tuple or list of them. Throws LOCKSTEP_INVALID_ARGUMENT.
std::vector<at::Tensor> tensors_of(const std::string& function, const c10::IValue& result);

}  // namespace lockstep::train_c
