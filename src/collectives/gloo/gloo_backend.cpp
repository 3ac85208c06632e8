#include "collectives/gloo/gloo_backend.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/error.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/clock.h"
#include "collectives/called_as.h"
#include "collectives/cause.h"
#include "collectives/core_types.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "collectives/gloo/flight_recorder.h"

// Gloo itself compares nothing: ranks that call different collectives take each other's data, or wait until the
// timeout. Here each collective has a tag of its own, so that messages of different collectives never match. When one
// makes no progress, and only then, the ranks tell each other through the store what they called (FlightRecorder). An
// exchange for every collective would double the time of a small one.

namespace lockstep::gloo_engine {
namespace {

using c10d::ReduceOp;

/// Never destroys an engine that has operations which will never be done: its destructor would wait until they time
/// out.
void leak(c10::intrusive_ptr<c10d::Backend> engine) {
  static auto* const left = new std::vector<c10::intrusive_ptr<c10d::Backend>>;
  left->push_back(std::move(engine));
}

/// A collective that is examined when it makes no progress.
class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> inner, c10::intrusive_ptr<c10d::Backend> engine,
              std::shared_ptr<FlightRecorder> recorder, Entry entry)
      : inner_(std::move(inner)),
        engine_(std::move(engine)),
        recorder_(std::move(recorder)),
        entry_(std::move(entry)) {}

  bool isCompleted() override { return inner_->isCompleted(); }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout.count() != 0) return inner_->wait(timeout);
    const auto started = Clock::now();
    // By the first check nearly every rank that is merely late has come.
    for (auto pause = kFirstCheck; !is_done_within(pause, started); pause = std::min(pause * 3 / 2, kLongestPause)) {
      const std::string mismatch = recorder_->compare(entry_);
      if (mismatch.empty()) continue;
      leak(engine_);
      throw Error(mismatch);
    }
    return true;
  }

 private:
  static constexpr std::chrono::milliseconds kFirstCheck{400}, kLongestPause{5000};

  bool is_done_within(std::chrono::milliseconds pause, Clock::time_point started) {
    try {
      return inner_->wait(pause);
    } catch (const std::exception& cause) {
      if (!inner_->isCompleted()) return false;  // only the pause is over
      if (inner_->isSuccess()) return inner_->wait();
      const auto timeout = std::clamp(std::chrono::milliseconds(static_cast<int64_t>(seconds_since(started) * 500)),
                                      std::chrono::milliseconds(250), std::chrono::milliseconds(2000));
      throw Error(cause_of(cause) + "; " + recorder_->after_failure(entry_, timeout));
    }
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const c10::intrusive_ptr<c10d::Backend> engine_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const Entry entry_;
};

/// A reduction whose operands travel in another form: converted before it starts, and back on the waiting thread.
class ConvertedWork final : public c10d::Work {
 public:
  ConvertedWork(c10::intrusive_ptr<c10d::Work> inner, std::function<void()> finish)
      : inner_(std::move(inner)), finish_(std::move(finish)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool ok = inner_->wait(timeout);
    if (auto finish = std::exchange(finish_, nullptr)) finish();
    return ok;
  }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  std::function<void()> finish_;
};

/// How a reduction that Gloo does not have is put to it.
struct Wire {
  at::Tensor tensor;  ///< what Gloo reduces; shares storage with the operand where it can
  ReduceOp op;
  std::function<void(at::Tensor)> restore;  ///< puts the result back into the operand; may be empty
};

Wire to_wire(const at::Tensor& operand, ReduceOp op, int world_size) {
  Wire wire{operand, op, nullptr};
  const bool mean = op == ReduceOp::AVG;
  if (mean) wire.op = ReduceOp::SUM;
  const auto dtype = operand.scalar_type();
  if (dtype == at::kBool) {
    // Bytes that are 0 or 1: any is their maximum, all is their minimum.
    wire.tensor = operand.view(at::kByte);
    const bool any = op == ReduceOp::SUM || op == ReduceOp::MAX || op == ReduceOp::BOR;
    wire.op = any ? ReduceOp::MAX : ReduceOp::MIN;
  } else if (dtype == at::kShort) {
    // Sums and products wrap the same way after narrowing.
    wire.tensor = operand.to(at::kInt);
    wire.restore = [operand](const at::Tensor& result) { operand.copy_(result); };
  } else if (operand.is_complex()) {
    TORCH_CHECK(wire.op == ReduceOp::SUM,
                "Gloo reduces complex tensors by sum and mean only; reduce the real and imaginary parts separately");
    wire.tensor = at::view_as_real(operand);
  }
  if (mean)
    wire.restore = [operand, world_size](const at::Tensor&) {
      // ATen's complex division rounds more than once.
      (operand.is_complex() ? at::view_as_real(operand) : operand).div_(world_size);
    };
  return wire;
}

/// What the ranks must agree on. Data that is only moved comes as bytes.
std::string text_of(const char* operation, const at::Tensor& operand, const ReduceOp& op) {
  return c10::str(operation, "(", c10::toString(operand.scalar_type()), ", ", operand.numel(), " elements, ",
                  shm::name(to_core(op)), ")");
}
std::string text_of(const char* operation, const at::Tensor& moved) {
  if (called_as != shm::CalledAs::kItself) return c10::str(shm::name(called_as), "()");
  return c10::str(operation, "(", moved.nbytes(), " bytes)");
}
std::string text_of(const char* operation, const at::Tensor& moved, int64_t root) {
  if (called_as != shm::CalledAs::kItself) return c10::str(shm::name(called_as), "(root ", root, ")");
  return c10::str(operation, "(", moved.nbytes(), " bytes, root ", root, ")");
}

class GlooBackend final : public c10d::ProcessGroupGloo {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

 public:
  GlooBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
              c10::intrusive_ptr<Options> options, std::shared_ptr<FlightRecorder> recorder)
      : ProcessGroupGloo(store, rank, world_size, std::move(options)), recorder_(std::move(recorder)) {}

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_all(text_of("all_reduce", tensors.at(0), options.reduceOp), tensors, options);
  }

  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Wire wire = to_wire(tensors.at(0), options.reduceOp, getSize());
    Tensors operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    const std::string text =
        text_of("reduce", tensors.at(0), options.reduceOp) + " to " + std::to_string(options.rootRank);
    return finish_with(watched(text, [&] { return ProcessGroupGloo::reduce(operands, wire_options); }), wire);
  }

  /// Gloo's own takes fewer dtypes and operations. Reducing everything gives the same bits as all_reduce.
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors all{input.clone()};
    c10d::AllreduceOptions all_options;
    all_options.reduceOp = options.reduceOp;
    all_options.timeout = options.timeout;
    auto work = reduce_all(text_of("reduce_scatter", output, options.reduceOp), all, all_options);
    return c10::make_intrusive<ConvertedWork>(std::move(work), [this, output, reduced = all[0]] {
      output.view(-1).copy_(reduced.view({getSize(), -1})[getRank()]);
    });
  }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return watched(text_of("broadcast", tensors.at(0), options.rootRank),
                   [&] { return ProcessGroupGloo::broadcast(tensors, options); });
  }

  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return watched(text_of("all_gather", input),
                   [&] { return ProcessGroupGloo::_allgather_base(output, input, options); });
  }

  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return watched(text_of("gather", inputs.at(0), options.rootRank),
                   [&] { return ProcessGroupGloo::gather(outputs, inputs, options); });
  }

  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return watched(text_of("scatter", outputs.at(0), options.rootRank),
                   [&] { return ProcessGroupGloo::scatter(outputs, inputs, options); });
  }

  /// Each rank may send and receive different amounts.
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& options) override {
    return watched("all_to_all()", [&] {
      return ProcessGroupGloo::alltoall_base(output, input, output_counts, input_counts, options);
    });
  }

  /// Writes in the caller's thread; all other operations write in threads that make_backend() has started.
  Work send(Tensors& tensors, int destination, int tag) override {
    const BlockedSigpipe blocked;
    return ProcessGroupGloo::send(tensors, destination, tag);
  }

  Work barrier(const c10d::BarrierOptions& options) override {
    return watched("barrier()", [&] { return ProcessGroupGloo::barrier(options); });
  }

 private:
  template <typename Start>
  Work watched(std::string text, const Start& start) {
    Entry entry = recorder_->add(std::move(text));
    collectiveCounter_ = recorder_->tag();
    return c10::make_intrusive<WatchedWork>(start(), c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this), recorder_,
                                            std::move(entry));
  }

  Work reduce_all(const std::string& text, Tensors& tensors, const c10d::AllreduceOptions& options) {
    const Wire wire = to_wire(tensors.at(0), options.reduceOp, getSize());
    Tensors operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    return finish_with(watched(text, [&] { return ProcessGroupGloo::allreduce(operands, wire_options); }), wire);
  }

  static Work finish_with(Work work, const Wire& wire) {
    if (!wire.restore) return work;
    return c10::make_intrusive<ConvertedWork>(std::move(work), [wire] { wire.restore(wire.tensor); });
  }

  const std::shared_ptr<FlightRecorder> recorder_;
};

auto options_for(const std::string& address, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return options;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout) {
  const BlockedSigpipe blocked;
  auto recorder = std::make_shared<FlightRecorder>(store, rank, world_size);
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options_for(address, timeout), std::move(recorder));
}

c10::intrusive_ptr<c10d::Backend> make_plain_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const std::string& address,
                                                     std::chrono::milliseconds timeout) {
  const BlockedSigpipe blocked;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, options_for(address, timeout));
}

}  // namespace lockstep::gloo_engine
