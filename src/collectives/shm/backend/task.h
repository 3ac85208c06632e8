#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/shm/request.h"

namespace lockstep::shm_engine {

/// The core's name of a dtype that it can reduce; the others it can only move.
std::optional<shm::DataType> data_type(at::ScalarType dtype);

/// What a caller's operation asks of the core, put together step by step: requests over dense memory, the tensors
/// that must live until the end, and the copies that bring results home.
class Task {
 public:
  /// `title` is "backend:operation", for the profiler and for messages. `options`: c10d's, of the operation.
  template <typename Options>
  Task(c10d::OpType type_, const char* title_, const Options& options)
      : type(type_), title(title_), timeout(options.timeout), waits(!options.asyncOp) {}
  /// Of a message, which c10d gives no options.
  Task(c10d::OpType type_, const char* title_)
      : type(type_), title(title_), timeout(c10d::kUnsetTimeout), waits(false) {}

  c10d::OpType type;
  const char* title;
  std::chrono::milliseconds timeout;  ///< kUnsetTimeout: the group's
  bool waits;                         ///< the caller wants the result and no Work
  std::vector<at::Tensor> inputs;     ///< as the caller gave them
  std::vector<at::Tensor> result;
  std::vector<shm::Request> requests;
  std::vector<at::Tensor> tensors;            ///< whose memory the core uses
  std::vector<std::function<void()>> finish;  ///< on success

  /// Dense memory with the tensor's elements, in its logical order; a copy where it is not dense.
  void* input(const at::Tensor& tensor);
  /// Dense memory whose content is in the tensor when the task is finished. `load`: it holds the tensor's elements
  /// from the start.
  void* output(const at::Tensor& tensor, bool load);

  /// A request that moves `elements` of this dtype; every dtype can be moved.
  shm::Request moving(shm::OperationKind kind, at::ScalarType dtype, int64_t elements) const;
  /// A request that reduces elements of this dtype.
  shm::Request reducing(shm::OperationKind kind, at::ScalarType dtype, int64_t elements,
                        const c10d::ReduceOp& op) const;
};

/// Throws unless it is a dense CPU tensor. `operation` begins the message.
void check_dense(const char* operation, const at::Tensor& tensor);
/// The same for all, and that they have one dtype.
void check_dense(const char* operation, const std::vector<at::Tensor>& tensors);
/// The one element of a list that c10d passes for the sake of many GPUs a process.
template <typename T>
T& only(const char* operation, std::vector<T>& list) {
  TORCH_CHECK_VALUE(list.size() == 1, operation, ": takes one tensor (or list of tensors) a rank, not ", list.size());
  return list.front();
}

}  // namespace lockstep::shm_engine
