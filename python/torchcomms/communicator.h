#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <comms/torchcomms/TorchCommBackend.hpp>

#include "base/error.h"
#include "base/mutex.h"
#include "work.h"

namespace lockstep::torchcomms {

namespace comms = torch::comms;
using std::chrono::milliseconds;

/// The life of a torchcomms communicator whose engine is Lockstep's c10d backend; the operations are in a class derived
/// from it. A failed one throws std::runtime_error on every rank, from the call or from wait(); the process never ends,
/// whatever CommOptions::abort_process_on_timeout_or_error says. Abort hooks run at a group's first failure.
class Communicator : public comms::TorchCommBackend, public std::enable_shared_from_this<Communicator> {
 public:
  ~Communicator() override;

  /// Waits for the other ranks, unless reconfigure() is to form the group.
  void init(at::Device device, const std::string& name, const comms::CommOptions& options) override;
  /// Waits until this rank's operations are done, and leaves the group. Throws if one of them is not.
  void finalize() override;
  /// -1 until the group is formed.
  int getRank() const override { return rank_; }
  int getSize() const override { return size_; }
  std::string_view getBackendName() const override { return "lockstep"; }
  std::string_view getBackendVersion() const override;
  std::string_view getCommName() const override { return name_; }
  /// Every rank calls it, those of no group with an empty list, and they get null. Throws if a group's lists differ.
  std::shared_ptr<comms::TorchCommBackend> split(const std::vector<int>& ranks, const std::string& name,
                                                 const comms::CommOptions& options) override;
  const comms::CommOptions& getOptions() const override { return options_; }
  const at::Device& getDevice() const override { return device_; }
  void setTimeout(milliseconds timeout) override { options_.timeout = timeout; }

  bool supportsReconfigure() const override { return true; }
  bool isInitialized() const override { return state_ == State::kFormed; }
  comms::InitHandle getInitHandle() const override { return handle_; }
  /// On one machine. The old group, if there is one, stays if the new one cannot be formed.
  c10::intrusive_ptr<comms::TorchWork> reconfigure(const comms::ReconfigureOptions& options) override;
  bool isAbortSupported() const override { return true; }
  bool isAborted() const override { return state_ == State::kAborted || failed_; }
  void abort() override;

  /// Owns itself until it is let go: shared_from_this() knows no owner that has it as a TorchCommBackend.
  Communicator* keep() { return (own_ = shared_from_this()).get(); }
  void let_go() { own_.reset(); }

 protected:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  /// Runs `start(backend)`, which returns the engine's works, with nulls for those that have been waited for.
  template <typename Start>
  c10::intrusive_ptr<comms::TorchWork> run(bool async_op, milliseconds timeout, const Start& start) {
    const BackendPtr backend = formed();
    EngineWork::Works works;
    try {
      works = start(*backend);
      for (const auto& work : works)
        if (work && !async_op) work->wait(limit(timeout));
    } catch (...) {
      rethrow(std::current_exception());
    }
    if (async_op) return in_progress(std::move(works), limit(timeout));
    return c10::make_intrusive<comms::TorchWorkCompleted>();
  }
  milliseconds limit(milliseconds timeout) const { return timeout == comms::kNoTimeout ? options_.timeout : timeout; }

 private:
  enum class State { kNew, kUnformed, kFormed, kAborted, kFinalized };
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  BackendPtr formed() const;
  void join(const StorePtr& store, int rank, int size);
  void replace(BackendPtr backend, State state);
  void note_failure();
  [[noreturn]] void rethrow(const std::exception_ptr& error);
  c10::intrusive_ptr<comms::TorchWork> in_progress(EngineWork::Works works, milliseconds timeout);
  template <typename... Words>
  [[noreturn]] void refuse(const Words&... words) const {
    throw Error(c10::str("torchcomms communicator '", name_, "': ", words...));
  }

  std::shared_ptr<Communicator> own_;
  at::Device device_{at::kCPU};
  std::string name_;
  comms::CommOptions options_;  ///< without the store
  comms::InitHandle handle_;
  struct {
    StorePtr given;    ///< by init(); null: none, and reconfigure() makes groups without one
    StorePtr present;  ///< of the present group, for split(); null: none
  } stores_;
  std::set<int64_t> uuids_;                                                      ///< of all calls of reconfigure()
  const std::shared_ptr<const bool> in_hands_ = std::make_shared<const bool>();  ///< the tickets of works
  int rank_ = -1, size_ = -1;
  std::atomic<State> state_{State::kNew};
  std::atomic<bool> failed_{false};  ///< an operation of the present group
  mutable Mutex mutex_;              ///< any thread may call abort()
  BackendPtr backend_ LOCKSTEP_GUARDED_BY(mutex_);
};

/// A communicator on which init() has not been called.
std::shared_ptr<Communicator> make_communicator();

}  // namespace lockstep::torchcomms
