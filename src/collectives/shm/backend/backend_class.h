#pragma once

#include <atomic>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/mutex.h"
#include "collectives/blocking_engine.h"
#include "collectives/machine_memory.h"
#include "collectives/shm/backend/shared_group.h"
#include "collectives/shm/backend/shm_work.h"
#include "collectives/shm/backend/tensor_request.h"

namespace lockstep::shm_engine {

/// c10d's operations in terms of the core's. Every operation builds a TensorRequest and launches it. Only sparse
/// reductions and the monitored barrier wait.
class ShmBackend final : public c10d::Backend, public BlockingEngine, public MachineMemory {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ShmBackend(SharedGroupPtr shared, std::chrono::milliseconds timeout, std::string name);

  // shm_backend.cpp
  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long elements, at::TensorOptions options) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
  /// Leaves the group without waiting: what is pending fails, and every later operation throws. Tensors in the group's
  /// memory stay valid.
  void shutdown() override;
  /// Ends the group on every rank.
  void abort() override;

  // blocking.cpp, with finish_now
  void run(shm::Request request) override;

  // machine_memory.cpp
  at::Tensor allocate_together(int64_t elements, const at::TensorOptions& options) override;
  std::vector<std::byte*> address_everywhere(const at::Tensor& mine) override;

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

  // messages.cpp
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  size_t ranks() const { return static_cast<size_t>(size_); }
  /// Starts what the request asks for. Where the caller wants no Work (TensorRequest::waits), returns none, and the
  /// operation is over.
  WorkPtr launch(TensorRequest request);
  WorkPtr launch(TensorRequest request, std::vector<shm::WorkPtr> works);
  /// Whether the request can go straight to the core, which will not refuse it.
  bool is_immediate(const TensorRequest& request);
  void finish_now(TensorRequest request);
  WorkPtr receive(TensorRequest request, at::Tensor& tensor, int from, int tag);
  std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) const;

  void add_all_reduce(TensorRequest& request, const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  void add_reduce_scatter(TensorRequest& request, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op) const;
  void add_all_gather(TensorRequest& request, const at::Tensor& output, const at::Tensor& input) const;
  void add_all_gather(TensorRequest& request, const Tensors& outputs, const at::Tensor& input) const;
  WorkPtr all_reduce_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options);
  void give_back_unowned();
  at::Tensor gather_rows(const at::Tensor& row, std::chrono::milliseconds timeout);

  const SharedGroupPtr shared_;
  const std::string name_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};  ///< operations started

  Mutex mutex_;
  std::optional<std::vector<WorkPtr>> coalescing_ LOCKSTEP_GUARDED_BY(mutex_);  ///< since startCoalescing
  /// On rank 0: what allocate_together made.
  std::vector<std::byte*> owned_together_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm_engine
