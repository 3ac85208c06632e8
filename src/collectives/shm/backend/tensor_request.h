#pragma once

#include <functional>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/shm/protocol/request.h"

namespace lockstep::shm_engine {

/// One of c10d's operations as the core will see it, built step by step: the core's requests over dense memory, the
/// tensors that must live until the end, and the copies of the results.
class TensorRequest {
 public:
  /// `title` is "backend:operation", for the profiler and for messages. `options` are c10d's for the operation.
  template <typename Options>
  TensorRequest(c10d::OpType type_, const char* title_, const Options& options)
      : type(type_), title(title_), timeout(options.timeout), waits(!options.asyncOp) {}
  /// For a message, which has no options in c10d.
  TensorRequest(c10d::OpType type_, const char* title_)
      : type(type_), title(title_), timeout(c10d::kUnsetTimeout), waits(false) {}

  c10d::OpType type;
  const char* title;
  std::chrono::milliseconds timeout;  ///< kUnsetTimeout: the group's
  bool waits;                         ///< the caller wants the result, not a Work
  std::vector<at::Tensor> inputs;     ///< as given by the caller
  std::vector<at::Tensor> result;
  std::vector<shm::Request> parts;            ///< for the core, in the order in which they are started
  std::vector<at::Tensor> tensors;            ///< whose memory the core uses
  std::vector<std::function<void()>> finish;  ///< to be run on success

  /// Dense memory with the tensor's elements, in its logical order; a copy if the tensor is not dense.
  void* input(const at::Tensor& tensor);
  /// Dense memory whose content is in the tensor once `finish` has run. `load`: it holds the tensor's elements from the
  /// start.
  void* output(const at::Tensor& tensor, bool load);

  /// A part that moves `elements` of this dtype; every dtype can be moved.
  shm::Request moving(shm::OperationKind kind, at::ScalarType dtype, int64_t elements) const;
  /// A part that reduces elements of this dtype.
  shm::Request reducing(shm::OperationKind kind, at::ScalarType dtype, int64_t elements,
                        const c10d::ReduceOp& op) const;
};

/// Throws unless the tensor is a dense CPU tensor. `operation` begins the message.
void check_dense(const char* operation, const at::Tensor& tensor);
/// check_dense() for each of them; they must also have one dtype.
void check_dense(const char* operation, const std::vector<at::Tensor>& tensors);
/// The only element of a list: c10d passes lists because a process may drive several GPUs.
template <typename T>
T& only(const char* operation, std::vector<T>& list) {
  TORCH_CHECK_VALUE(list.size() == 1, operation, ": takes one tensor (or list of tensors) per rank, not ", list.size());
  return list.front();
}

}  // namespace lockstep::shm_engine
