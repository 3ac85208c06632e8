#pragma once

#include <atomic>
#include <set>
#include <string>

#include "base/mutex.h"
#include "collectives/engine_interfaces.h"
#include "collectives/shm/backend/backend_state.h"
#include "collectives/shm/backend/group_memory.h"
#include "collectives/shm/backend/request_backend.h"
#include "collectives/shm/backend/shm_work.h"
#include "collectives/torch_releases.h"

namespace lockstep::shm_engine {

/// Launches every operation in the core. Only sparse reductions and the monitored barrier wait.
class ShmBackend final : public Regroups<RequestBackend>,
                         public BlockingEngine,
                         public Interruptible,
                         public FinishesPending,
                         public SharesMemory {
 public:
  /// `writes_page`: this object's operations are shown on the rank's page.
  ShmBackend(BackendStatePtr shared, std::chrono::milliseconds timeout, std::string name, bool writes_page = false);
  /// One that has no group yet; see make_unformed_backend().
  ShmBackend(int rank, int size, std::chrono::milliseconds timeout, std::string name, bool writes_page);

  // shm_backend.cpp
  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  /// Shows the group on the page, under the name that c10d gives it once all of its ranks have made it.
  void setGroupUid(const std::string& uid) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long elements, at::TensorOptions options) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
  /// Leaves the group without waiting: pending operations fail, and every later one throws. Tensors in the group's
  /// memory stay valid.
  void shutdown() override;
  /// Ends the group on every rank.
  void abort() override;
  void interrupt(const std::string& why) override {
    if (shared_) shared_->core().abort(why);
  }
  std::string finish(const Deadline& deadline) override {
    return shared_ && !shared_->is_told() ? shared_->core().finish(deadline) : "";
  }

  /// The group's core, for an engine built on this one.
  shm::Communicator& core() { return state().core(); }
  const BackendStatePtr& shared() const { return state(), shared_; }

  // blocking.cpp, with finish_now
  void run(shm::Request&& request) override;

  MachineMemory& machine_memory() override { return memory_; }

  // messages.cpp
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // regroup.cpp
  std::string handle() const override;
  void regroup(Regrouping regrouping) override;
  void join(BackendStatePtr group);
  /// The group's state. Throws if this rank has no group yet.
  BackendState& state() const {
    if (!shared_) throw_unformed();
    return *shared_;
  }
  [[noreturn]] static void throw_unformed();

  WorkPtr launch(TensorRequest request) override;
  WorkPtr launch(TensorRequest request, std::vector<shm::WorkPtr> works);
  /// Whether the request can go straight to the core, which will not refuse it.
  bool is_immediate(const TensorRequest& request);
  void finish_now(TensorRequest request);
  WorkPtr receive(TensorRequest request, at::Tensor& tensor, int from, int tag);
  std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) const;
  /// Null if nothing is shown.
  std::optional<PageNote> page_note(const TensorRequest& request, uint64_t sequence);

  void show_group();

  BackendStatePtr shared_;  ///< replaced by regroup() alone, with which no other call of this object may coincide
  const std::string name_;
  const bool writes_page_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};  ///< operations started
  PageGroup on_page_;                  ///< set before the first operation
  GroupMemory memory_{*this};

  mutable Mutex mutex_;
  mutable std::string handle_ LOCKSTEP_GUARDED_BY(mutex_);  ///< empty before the first call of handle()
  std::set<int64_t> uuids_ LOCKSTEP_GUARDED_BY(mutex_);     ///< of all calls of regroup()
  std::optional<std::vector<WorkPtr>> coalescing_ LOCKSTEP_GUARDED_BY(mutex_);  ///< since startCoalescing
};

}  // namespace lockstep::shm_engine
