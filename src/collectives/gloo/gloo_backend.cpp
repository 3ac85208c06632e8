#include "collectives/gloo/gloo_backend.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/mutex.h"
#include "base/shared_segment.h"
#include "collectives/called_as.h"
#include "collectives/core_types.h"
#include "collectives/data_port.h"
#include "collectives/engine_interfaces.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "collectives/gloo/connecting.h"
#include "collectives/gloo/flight_recorder.h"
#include "collectives/gloo/messages.h"
#include "collectives/gloo/pending_works.h"
#include "collectives/gloo/tree_reduction.h"
#include "collectives/gloo/uneven_exchange.h"
#include "collectives/gloo/watched_work.h"
#include "collectives/message_watch.h"
#include "collectives/operand.h"
#include "collectives/root_rank.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/typed_message.h"

// Gloo itself compares nothing: ranks that call different collectives take each other's data, or wait until the
// timeout. Here each collective has its own tag, so that messages of different collectives never match. Only when one
// makes no progress, the ranks tell each other through the store what they called (FlightRecorder). An exchange for
// every collective would double the time of a small one.

namespace lockstep::gloo_engine {
namespace {

using c10d::ReduceOp;

/// The tag bit that separates messages of collectives from the program's.
constexpr int kCollectiveTag = 1 << 30;

/// A collective of our own, on one of Gloo's threads. These take a group's collectives in order, as on every rank, so
/// the oldest one always makes progress.
class MessagesWork final : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  MessagesWork(std::shared_ptr<gloo::Context> context, c10d::OpType type, uint64_t sequence,
               std::chrono::milliseconds timeout, at::Tensor input, const at::Tensor& output,
               std::function<void()> body)
      : AsyncWork(std::move(context), {{output}}, type, sequence, timeout),
        input_(std::move(input)),
        output_(output),
        body_(std::move(body)) {}

  void run() override { body_(); }
  const std::vector<at::Tensor> getInputTensors() override { return {input_}; }
  const std::vector<at::Tensor> getOutputTensors() override { return {output_}; }

 private:
  const at::Tensor input_, output_;
  const std::function<void()> body_;
};

shm::ReduceFunction kernel_for(const at::Tensor& operand, const ReduceOp& op, int world_size) {
  const auto type = to_core(operand.scalar_type());
  const bool has_factor = op == ReduceOp::PREMUL_SUM;  // one for each rank
  const auto kernel = type && !has_factor ? shm::find_reduce(*type, to_core(op), world_size) : nullptr;
  TORCH_CHECK(kernel != nullptr, "Gloo reduces no ", dtype_name(operand.scalar_type()), " tensors by ",
              shm::name(to_core(op)));
  return kernel;
}

/// The text on which the ranks must agree. `count` elements are one rank's block.
std::string text_of(shm::Call call, const at::Tensor& operand, int64_t count) {
  call.type = to_moved(operand.scalar_type());
  call.count = static_cast<size_t>(count) * (operand.element_size() / shm::element_bytes(call.type));
  if (!shm::is_reduction(call.kind)) call.called_as = called_as;
  return call.text();
}
std::string text_of(const shm::Call& call, const at::Tensor& operand) {
  return text_of(call, operand, operand.numel());
}

std::vector<at::Tensor> bytes_of_all(const std::vector<at::Tensor>& dense) {
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& tensor : dense) bytes.push_back(as_bytes(tensor));
  return bytes;
}

class GlooBackend final : public c10d::ProcessGroupGloo,
                          public Interruptible,
                          public FinishesPending,
                          public LeavesWord {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Kind = shm::OperationKind;

 public:
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
              c10::intrusive_ptr<Options> options, std::shared_ptr<FlightRecorder> recorder,
              std::shared_ptr<MessageWatch> messages)
      : ProcessGroupGloo(store, rank, world_size, std::move(options)),
        recorder_(std::move(recorder)),
        messages_(std::move(messages)) {}
  /// Before the connections close, so that the others learn why they do.
  ~GlooBackend() override {
    leave_word();
    messages_->stop();
  }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = tensors.at(0);
    return reduction(text_of({.kind = Kind::kAllReduce, .op = to_core(options.reduceOp)}, tensor),
                     c10d::OpType::ALLREDUCE, options.reduceOp,
                     {.kind = TreeReduction::Kind::kAllReduce, .input = tensor, .output = tensor});
  }

  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = tensors.at(0);
    const int root = root_rank("reduce", options.rootRank, getSize());
    return reduction(text_of({.kind = Kind::kReduce, .op = to_core(options.reduceOp), .root = root}, tensor),
                     c10d::OpType::REDUCE, options.reduceOp,
                     {.kind = TreeReduction::Kind::kReduce, .root = root, .input = tensor, .output = tensor});
  }

  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduction(text_of({.kind = Kind::kReduceScatter, .op = to_core(options.reduceOp)}, output),
                     c10d::OpType::_REDUCE_SCATTER_BASE, options.reduceOp,
                     {.kind = TreeReduction::Kind::kReduceScatter, .input = input, .output = output});
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors bytes = bytes_of_all(tensors);
    return watched(
        text_of({.kind = Kind::kBroadcast, .root = root_rank("broadcast", options.rootRank, getSize())}, tensors.at(0)),
        [&] { return ProcessGroupGloo::broadcast(bytes, options); });
  }

  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*options*/) override {
    return by_messages(text_of({.kind = Kind::kAllGather}, input), c10d::OpType::_ALLGATHER_BASE, input, output,
                       [output, input, rank = getRank(), size = getSize()](const Messages& messages) {
                         all_gather(output, input, rank, size, messages);
                       });
  }

  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors from = bytes_of_all(inputs);
    std::vector<Tensors> to;
    for (const Tensors& rows : outputs) to.push_back(bytes_of_all(rows));
    return watched(
        text_of({.kind = Kind::kGather, .root = root_rank("gather", options.rootRank, getSize())}, inputs.at(0)),
        [&] { return ProcessGroupGloo::gather(to, from, options); });
  }

  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors to = bytes_of_all(outputs);
    std::vector<Tensors> from;
    for (const Tensors& rows : inputs) from.push_back(bytes_of_all(rows));
    return watched(
        text_of({.kind = Kind::kScatter, .root = root_rank("scatter", options.rootRank, getSize())}, outputs.at(0)),
        [&] { return ProcessGroupGloo::scatter(to, from, options); });
  }

  /// Each rank may send and receive different amounts.
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& options) override {
    const bool even = output_counts.empty() && input_counts.empty();
    const shm::Call call{.kind = even ? Kind::kAllToAll : Kind::kAllToAllUneven};
    std::string text = text_of(call, input, input.numel() / getSize());
    if (!even)
      return by_messages(std::move(text), c10d::OpType::ALLTOALL_BASE, input, output,
                         [task = UnevenExchange::of(output, output_counts, input, input_counts, getRank(), getSize())](
                             const Messages& messages) { run(task, messages); });
    at::Tensor to = as_byte_rows(output, output.size(0)), from = as_byte_rows(input, input.size(0));
    return watched(std::move(text),
                   [&] { return ProcessGroupGloo::alltoall_base(to, from, output_counts, input_counts, options); });
  }

  /// Writes in the caller's thread; all other operations write in threads that make_backend() has started.
  Work send(Tensors& tensors, int destination, int tag) override {
    check_not_over();
    const BlockedSigpipe blocked;
    auto work = send_typed(tensors.at(0), [&](const at::Tensor& bytes, int part) {
      Tensors parts{bytes};
      const MutexLock lock(*starting_);
      return ProcessGroupGloo::send(parts, destination, part_tag(tag, part));
    });
    return messages_->watched(std::move(work), {.is_send = true, .peer = destination, .tag = tag});
  }

  Work recv(Tensors& tensors, int source, int tag) override {
    check_not_over();
    const MessageName name{.from = source, .to = getRank(), .tag = tag};
    auto work = receive_typed(tensors.at(0), name, [&](const at::Tensor& bytes, int part) {
      Tensors parts{bytes};
      const MutexLock lock(*starting_);
      return ProcessGroupGloo::recv(parts, source, part_tag(tag, part));
    });
    return messages_->watched(std::move(work), {.is_send = false, .peer = source, .tag = tag});
  }

  Work barrier(const c10d::BarrierOptions& options) override {
    return watched(shm::Call{}.text(), [&] { return ProcessGroupGloo::barrier(options); });
  }

  void interrupt(const std::string& why) override {
    recorder_->interrupt(why);
    messages_->interrupt(why);
  }
  std::string finish(const Deadline& deadline) override {
    std::string why = pending_->finish(*recorder_, deadline);
    if (!why.empty()) leak(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this));
    return why;
  }
  void leave_word() override {
    // In a child of fork(), a mutex may be held by a thread that is not there.
    if (generation_ == fork_generation()) recorder_->leave_word(pending_->first());
  }

  int64_t bytes_sent() const { return *sent_; }

 private:
  /// A wrong message ends the group: the ranks that do not know it yet wait in vain for this one, and are told.
  void check_not_over() {
    if (const std::string why = messages_->verdict(); !why.empty()) throw Error(why);
  }

  template <typename Start>
  Work watched(std::string text, const Start& start) {
    check_not_over();
    Entry entry = recorder_->add(std::move(text));
    messages_->note_collective();
    const MutexLock lock(*starting_);
    collectiveCounter_ = recorder_->tag();
    Work work = start();
    pending_->add(entry, work);
    return c10::make_intrusive<WatchedWork>(std::move(work), c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this),
                                            recorder_, messages_, pending_, std::move(entry));
  }

  /// `task` without its ranks and kernel.
  Work reduction(std::string text, c10d::OpType type, const ReduceOp& op, TreeReduction task) {
    task.rank = getRank();
    task.world_size = getSize();
    task.kernel = kernel_for(task.input, op, task.world_size);
    const at::Tensor input = task.input, output = task.output;
    return by_messages(std::move(text), type, input, output,
                       [task = std::move(task)](const Messages& messages) { run(task, messages); });
  }

  Work by_messages(std::string text, c10d::OpType type, const at::Tensor& input, const at::Tensor& output,
                   std::function<void(const Messages&)> body) {
    return watched(std::move(text), [&] {
      auto work = c10::make_intrusive<MessagesWork>(
          contexts_.front(), type, ++seq_, options_->timeout, input, output,
          [body = std::move(body), own = messages(static_cast<int>(recorder_->tag()))] { body(own); });
      enqueue(work);
      return work;
    });
  }

  /// The engine's destructor waits for its queue, and derived objects are gone by then.
  Messages messages(int tag) {
    const auto tag_of = [tag](Stage stage) {
      constexpr int kStageTag = kCollectiveTag >> 1;
      return kCollectiveTag | (stage == Stage::kResults ? kStageTag : 0) | (tag & (kStageTag - 1));
    };
    ProcessGroupGloo* const engine = this;
    const auto starting = starting_;
    return {.send =
                [=, sent = sent_](const at::Tensor& bytes, int peer, Stage stage) {
                  Tensors tensors{bytes};
                  *sent += bytes.numel();
                  const MutexLock lock(*starting);
                  return engine->ProcessGroupGloo::send(tensors, peer, tag_of(stage));
                },
            .receive =
                [=](const at::Tensor& bytes, int peer, Stage stage) {
                  Tensors tensors{bytes};
                  const MutexLock lock(*starting);
                  return engine->ProcessGroupGloo::recv(tensors, peer, tag_of(stage));
                }};
  }

  const unsigned generation_ = fork_generation();  ///< of the process that made the group
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<MessageWatch> messages_;
  const std::shared_ptr<PendingWorks> pending_ = std::make_shared<PendingWorks>();
  const std::shared_ptr<std::atomic<int64_t>> sent_ = std::make_shared<std::atomic<int64_t>>(0);
  /// Held while anything is started: the engine's counters allow one thread, and its threads start messages, too.
  const std::shared_ptr<Mutex> starting_ = std::make_shared<Mutex>();
};

std::string to_text(const std::vector<Connection>& connections) {
  std::string text;
  for (const Connection& one : connections) text += one.from + " " + one.to + "\n";
  return text;
}

std::vector<Connection> to_connections(const std::string& text) {
  std::vector<Connection> connections;
  std::istringstream words(text);
  for (Connection one; words >> one.from >> one.to;) connections.push_back(one);
  return connections;
}

/// Disconnects strangers once all ranks are connected.
/// REQUIRES: all ranks call it.
void close_port(const DataPort& port, const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                std::chrono::milliseconds timeout) {
  const auto tell_all =
      shm_engine::exchange_over(c10::make_intrusive<c10d::PrefixStore>("data_port", store), rank, world_size, timeout);
  std::vector<Connection> made;
  for (const std::string& text : tell_all(to_text(port.made())))
    for (Connection& one : to_connections(text)) made.push_back(std::move(one));
  const Strangers strangers = port.close(made);
  for (const Connection& one : strangers.shut_down)
    TORCH_WARN(one.from, " had connected to the data port ", one.to, " of rank ", rank,
               " and is not a rank; the connection was shut down. If it took a rank's place, the group's operations "
               "will fail");
  if (!strangers.untold.empty())
    TORCH_WARN("the network translates addresses between the ranks, so rank ", rank,
               " cannot tell strangers from ranks among the ", strangers.untold.size(),
               " connections to its data port");
}

struct Timeouts {
  std::chrono::milliseconds operation;
  std::optional<std::chrono::milliseconds> joining;  ///< none: as for an operation
};

/// An engine with its own port, to which only ranks are connected. `make` owns what it uses (connect_all()).
template <typename Make>
c10::intrusive_ptr<c10d::Backend> connected(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            const std::string& address, const Timeouts& timeouts, Make make) {
  const BlockedSigpipe blocked;
  const auto joining = timeouts.joining.value_or(timeouts.operation);
  // Its connections keep this timeout, so connect_all() limits the joining.
  auto options = c10d::ProcessGroupGloo::Options::create(timeouts.operation);
  const auto port = std::make_shared<const DataPort>(
      [&] { options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address)); });
  auto engine =
      connect_all({.store = store, .rank = rank, .world_size = world_size, .timeout = joining, .port = port},
                  [make = std::move(make), options] { return c10::intrusive_ptr<c10d::Backend>(make(options)); });
  close_port(*port, store, rank, world_size, joining);
  return engine;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout,
                                               std::optional<std::chrono::milliseconds> join_timeout) {
  auto recorder = std::make_shared<FlightRecorder>(store, rank, world_size);
  leave_word_at_exit(recorder);
  auto messages = std::make_shared<MessageWatch>(store, rank, world_size);
  return connected(store, rank, world_size, address, {timeout, join_timeout}, [=](const auto& options) {
    return c10::make_intrusive<GlooBackend>(store, rank, world_size, options, recorder, messages);
  });
}

c10::intrusive_ptr<c10d::Backend> make_plain_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const std::string& address,
                                                     std::chrono::milliseconds timeout,
                                                     std::optional<std::chrono::milliseconds> join_timeout) {
  return connected(store, rank, world_size, address, {timeout, join_timeout}, [=](const auto& options) {
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, options);
  });
}

int64_t bytes_sent(const c10d::Backend& backend) { return dynamic_cast<const GlooBackend&>(backend).bytes_sent(); }

}  // namespace lockstep::gloo_engine
