#include "collectives/hierarchical/hierarchical_backend.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/called_as.h"
#include "collectives/core_types.h"
#include "collectives/engine_interfaces.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "collectives/gloo/gloo_backend.h"
#include "collectives/hierarchical/engine.h"
#include "collectives/hierarchical/gloo_carrier.h"
#include "collectives/hierarchical/halving_plan.h"
#include "collectives/machine_memory.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/shm/kernels/reduce.h"
#include "collectives/typed_message.h"

namespace lockstep::hierarchical_engine {
namespace {

using c10::intrusive_ptr;
using shm_engine::TensorRequest;

class HierarchicalWork final : public c10d::Work {
 public:
  HierarchicalWork(EnginePtr engine, c10d::OpType type, std::vector<at::Tensor> result)
      : Work(engine->layout().rank, type),
        engine_(std::move(engine)),
        result_(std::move(result)),
        completed_future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void add(JobPtr job) { jobs_.push_back(std::move(job)); }
  /// Called when the last job is done.
  static void complete(const intrusive_ptr<c10::ivalue::Future>& future, const std::vector<at::Tensor>& result,
                       const std::exception_ptr& error) {
    if (error)
      future->setError(error);
    else
      future->markCompleted(c10::IValue(result));
  }
  const intrusive_ptr<c10::ivalue::Future>& future() const { return completed_future_; }

  /// Runs pending work until it is done; errors stay in the work.
  void finish() {
    const gloo_engine::BlockedSigpipe blocked;
    for (const JobPtr& job : jobs_) engine_->wait_until(job, nullptr);
  }

  bool isCompleted() override { return jobs_.empty() || engine_->runner().is_done(jobs_.back()); }
  bool isSuccess() const override {
    return std::all_of(jobs_.begin(), jobs_.end(),
                       [&](const JobPtr& job) { return engine_->runner().is_done(job) && !job->error; });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const gloo_engine::BlockedSigpipe blocked;
    const Deadline deadline(timeout);
    if (!isCompleted()) engine_->require("waiting for an operation");
    for (const JobPtr& job : jobs_) {
      if (!engine_->wait_until(job, timeout == kNoTimeout ? nullptr : &deadline))
        throw Error("the operation is not done after " + std::to_string(timeout.count()) + " ms");
      engine_->rethrow_error_of(job);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { engine_->abort("abort() was called on an operation"); }
  std::vector<at::Tensor> result() override { return result_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return completed_future_; }

 private:
  const EnginePtr engine_;
  const std::vector<at::Tensor> result_;
  const intrusive_ptr<c10::ivalue::Future> completed_future_;
  std::vector<JobPtr> jobs_;
};

/// The shared memory of one machine's ranks is their own engine's.
class HierarchicalBackend final : public shm_engine::RequestBackend,
                                  public BlockingEngine,
                                  public Interruptible,
                                  public FinishesPending,
                                  public LeavesWord,
                                  public SharesMemory,
                                  public MachineMemory {
 public:
  HierarchicalBackend(EnginePtr engine, std::shared_ptr<Carrier> messages, std::string name,
                      std::chrono::milliseconds timeout)
      : RequestBackend(engine->layout().rank, engine->layout().world_size()),
        BlockingEngine(/*compares_all_calls=*/false),
        engine_(std::move(engine)),
        messages_(std::move(messages)),
        name_(std::move(name)),
        timeout_(timeout) {}

  /// Another backend with this one's engine.
  intrusive_ptr<c10d::Backend> with_timeout(std::chrono::milliseconds timeout) const {
    return c10::make_intrusive<HierarchicalBackend>(engine_, messages_, name_, timeout);
  }

  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return engine_->shared() != nullptr && engine_->shared()->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long elements, at::TensorOptions options) override {
    return engine_->shared()->allocateTensor(elements, options);
  }
  void shutdown() override { engine_->leave(); }
  void abort() override { engine_->abort("abort() was called on the group"); }
  void interrupt(const std::string& why) override { engine_->interrupt(why); }
  std::string finish(const Deadline& deadline) override { return engine_->finish(deadline); }
  void leave_word() override { engine_->leave_word(); }

  void run(shm::Request&& request) override {
    request.called_as = called_as;
    check(request);
    engine_->wait(engine_->start(std::move(request), timeout_, /*at_once=*/true));
  }

  MachineMemory& machine_memory() override { return *this; }
  int ranks_here() const override { return engine_->layout().ranks_on(engine_->layout().here()); }
  int rank_here() const override { return engine_->layout().local(); }

  at::Tensor allocate_together(int64_t elements, const at::TensorOptions& options) override {
    finish_earlier_operations();
    at::Tensor memory;
    std::string failure;
    try {
      memory = engine_->shared() != nullptr ? engine_->shared()->machine_memory().allocate_together(elements, options)
                                            : allocate_alone(elements, options);
    } catch (const LimitError& error) {
      failure = error.what();
    }
    int32_t failed = failure.empty() ? 0 : 1;
    run({.kind = shm::OperationKind::kAllReduce,
         .type = shm::DataType::kInt32,
         .op = shm::ReduceOp::kMax,
         .count = 1,
         .input = &failed,
         .output = &failed});
    if (failed == 0) return memory;
    throw LimitError(failure.empty()
                         ? "memory for the ranks of a machine together: another machine has too little for " +
                               std::to_string(elements) + " elements"
                         : failure);
  }

  std::vector<std::byte*> address_everywhere(const at::Tensor& mine) override {
    finish_earlier_operations();
    if (engine_->shared() != nullptr) return engine_->shared()->machine_memory().address_everywhere(mine);
    return {static_cast<std::byte*>(mine.mutable_data_ptr())};
  }

  std::optional<uint64_t> place_of(const at::Tensor& mine) const override {
    return engine_->shared() != nullptr ? engine_->shared()->machine_memory().place_of(mine) : std::nullopt;
  }
  const std::byte* memory_of(int rank, uint64_t place) const override {
    const int local = local_of(rank);
    return engine_->shared() != nullptr && local >= 0 ? engine_->shared()->machine_memory().memory_of(local, place)
                                                      : nullptr;
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    TensorRequest request(c10d::OpType::BARRIER, "lockstep:barrier", options);
    request.parts.emplace_back();
    return launch(std::move(request));
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    engine_->require("send");
    const MessageWatch::Message message{.is_send = true, .peer = to, .tag = tag};
    if (const int local = local_of(to); local >= 0)
      return engine_->messages().watched(engine_->shared()->send(tensors, local, tag), message);
    const gloo_engine::BlockedSigpipe blocked;
    return engine_->messages().watched(send_typed(shm_engine::only("send", tensors),
                                                  [&](const at::Tensor& bytes, int part) {
                                                    return messages_->send(bytes, to, messages_->part_tag(tag, part));
                                                  }),
                                       message);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    engine_->require("recv");
    const MessageWatch::Message message{.is_send = false, .peer = from, .tag = tag};
    if (const int local = local_of(from); local >= 0)
      return engine_->messages().watched(engine_->shared()->recv(tensors, local, tag), message);
    return engine_->messages().watched(
        receive_typed(shm_engine::only("recv", tensors), {.from = from, .to = getRank(), .tag = tag},
                      [&](const at::Tensor& bytes, int part) {
                        return messages_->receive(bytes, from, messages_->part_tag(tag, part));
                      }),
        message);
  }
  WorkPtr recvAnysource(Tensors&, int) override {
    TORCH_CHECK(false, "recv from any rank: ranks on several machines can receive only from a rank that they name");
  }

 protected:
  WorkPtr launch(TensorRequest request) override {
    for (const shm::Request& part : request.parts) check(part);
    ++sequence_;
    auto work = c10::make_intrusive<HierarchicalWork>(engine_, request.type, request.result);
    const bool is_given = request.timeout != c10d::kUnsetTimeout && request.timeout != kNoTimeout;
    const auto timeout = is_given ? std::min(request.timeout, kLongestTimeout) : timeout_;
    auto kept = std::make_shared<Tensors>(std::move(request.tensors));
    auto finish = [kept, steps = std::move(request.finish)] {
      at::NoGradGuard no_grad;
      for (const auto& step : steps) step();
    };
    const size_t count = request.parts.size();
    if (count == 0) HierarchicalWork::complete(work->future(), request.result, nullptr);
    for (size_t i = 0; i < count; ++i) {
      const bool is_last = i + 1 == count;
      std::function<void(const std::exception_ptr&)> at_end;
      if (is_last)
        at_end = [future = work->future(), result = request.result](const std::exception_ptr& error) {
          HierarchicalWork::complete(future, result, error);
        };
      work->add(engine_->start(
          std::move(request.parts[i]), timeout, request.waits, is_last ? std::function<void()>(finish) : [kept] {},
          std::move(at_end)));
    }
    // A future's callback may wait for this one, and occupy the thread that would run its jobs.
    if (!request.waits && Runner::is_calling_back()) work->finish();
    if (!request.waits) return work;
    work->wait(kNoTimeout);
    return {};
  }

 private:
  /// Afterwards no operation of this rank uses the machine's own engine, so the caller may.
  void finish_earlier_operations() { run({}); }

  /// The rank's number on this machine, or -1 if messages to it go over the carrier: to a rank of another machine, or
  /// to any rank if a wait in shared memory would hold up other groups' messages.
  int local_of(int rank) const {
    const Layout& layout = engine_->layout();
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize() && rank != getRank(), "rank ", rank,
                      " is not another rank of the group");
    if (layout.machine_of[static_cast<size_t>(rank)] != layout.here() || !engine_->may_wait_in_memory()) return -1;
    return layout.local_of[static_cast<size_t>(rank)];
  }

  void check(const shm::Request& request) const {
    TORCH_CHECK_VALUE(request.root >= 0 && request.root < getSize(), shm::name(request.kind), ": there is no rank ",
                      request.root);
    if (!shm::is_reduction(request.kind)) return;
    const bool is_defined = shm::find_reduce(request.type, request.op, getSize()) != nullptr;
    const bool is_split = request.op != shm::ReduceOp::kPremulSum &&
                          (request.op != shm::ReduceOp::kMean ||
                           shm::find_reduce(request.type, shm::ReduceOp::kAnd, getSize()) == nullptr);
    TORCH_CHECK(is_defined && is_split, shm::name(request.kind), ": ", shm::name(request.op), " of ",
                shm::name(request.type), " is not defined between several machines");
  }

  const EnginePtr engine_;
  const std::shared_ptr<Carrier> messages_;  ///< for send and receive, whose tags are the callers'
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> sequence_{0};  ///< collectives started through c10d's interface
};

}  // namespace

intrusive_ptr<c10d::Backend> make_backend_over(Carriers carriers, const intrusive_ptr<c10d::Store>& store,
                                               const Layout& layout, const Timeouts& timeouts, const std::string& name,
                                               bool several_callers) {
  auto shared = form_machine(store, layout, timeouts.operation, timeouts.joining);
  auto engine = std::make_shared<Engine>(layout, std::move(shared), std::move(carriers.collectives), store,
                                         std::min(timeouts.operation, kLongestTimeout));
  if (several_callers) engine->messages().expect_several_callers();
  const auto timeout = engine->timeout();
  return c10::make_intrusive<HierarchicalBackend>(std::move(engine), std::move(carriers.messages), name, timeout);
}

intrusive_ptr<c10d::Backend> share_group_of(const c10d::Backend& backend, std::chrono::milliseconds timeout) {
  const auto* const own = dynamic_cast<const HierarchicalBackend*>(&backend);
  return own == nullptr ? nullptr : own->with_timeout(std::min(timeout, kLongestTimeout));
}

intrusive_ptr<c10d::Backend> make_backend(const intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                          const Options& options) {
  const auto machines = shm_engine::exchange_over(c10::make_intrusive<c10d::PrefixStore>("where", store), rank,
                                                  world_size, options.join_timeout)(options.machine);
  const Layout layout = Layout::of(rank, machines);
  if (layout.machines() == 1 && world_size <= shm::kMaxRanks)
    return shm_engine::make_backend(store, rank, world_size, options.timeout, "shm", false, options.join_timeout);
  const int most = layout.most_on_a_machine();
  if (most > shm::kMaxRanks && !options.for_group)
    throw Error("a machine has " + std::to_string(most) + " ranks, and shared memory serves at most " +
                std::to_string(shm::kMaxRanks) + "; start fewer ranks on each machine");
  // Gloo's engine has no halving and doubling, which more machines need.
  const bool is_gloos = most == 1 && layout.machines() <= kMostDirect;
  if (options.for_group && (is_gloos || most > shm::kMaxRanks))
    return gloo_engine::make_backend(store, rank, world_size, options.address, options.timeout, options.join_timeout);
  const auto connect = [&](const char* name) {
    return std::make_shared<GlooCarrier>(
        gloo_engine::make_plain_backend(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, world_size,
                                        options.address, options.timeout, options.join_timeout));
  };
  Carriers carriers{.collectives = connect("between"), .messages = connect("messages")};
  return make_backend_over(std::move(carriers), store, layout, {options.timeout, options.join_timeout}, "hierarchical",
                           /*several_callers=*/!options.for_group);
}

}  // namespace lockstep::hierarchical_engine
