#pragma once

#include "collectives/shm/backend/tensor_request.h"
#include "collectives/torch_releases.h"

namespace lockstep::shm_engine {

/// c10d's collectives in the core's terms: each builds a TensorRequest and launches it. The engine defines launch().
/// Only sparse reductions wait.
class RequestBackend : public EveryReleasesBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using EveryReleasesBackend::EveryReleasesBackend;

  // reductions.cpp
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  // movements.cpp
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;

 protected:
  size_t ranks() const { return static_cast<size_t>(size_); }
  /// Starts the request's parts. If the caller wants no Work (TensorRequest::waits), returns none, and the operation is
  /// over.
  virtual WorkPtr launch(TensorRequest request) = 0;

 private:
  void add_all_reduce(TensorRequest& request, const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  WorkPtr reduce_scatter_uneven(TensorRequest request, const at::Tensor& output, const Tensors& blocks,
                                const c10d::ReduceOp& op);
  void add_reduce_scatter(TensorRequest& request, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op) const;
  void add_all_gather(TensorRequest& request, const at::Tensor& output, const at::Tensor& input) const;
  void add_all_gather(TensorRequest& request, const Tensors& outputs, const at::Tensor& input) const;
  WorkPtr all_reduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options);
  at::Tensor gather_rows(const at::Tensor& row, std::chrono::milliseconds timeout);
};

}  // namespace lockstep::shm_engine
