#include "collectives/nccl/nccl_backend.h"

#include <array>
#include <cstdio>
#include <functional>
#include <thread>
#include <utility>

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/clock.h"

// By default c10d's NCCL does not fit Group's contract: waiting for a work orders streams and returns, and a thread of
// c10d ends the process when an operation fails or takes too long. Its blocking mode does fit: there is no such thread,
// and a wait ends when the device is done, or with an exception. The end of a backward orders streams and returns
// (order_after()).

namespace lockstep::nccl_engine {
namespace {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

/// An operation in flight, or one that could not be started, which fails when waited for.
class NcclWork final : public c10d::Work {
 public:
  NcclWork(WorkPointer inner, std::chrono::milliseconds timeout) : inner_(std::move(inner)), timeout_(timeout) {}
  explicit NcclWork(std::exception_ptr failure) : timeout_(0), failure_(std::move(failure)) {}
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;

  /// Nobody waited. The operation's memory is freed now, and must not be reused before the operation is over.
  ~NcclWork() override {
    if (inner_ == nullptr || waited_) return;
    try {
      inner_->synchronize();
    } catch (const std::exception&) {
      // The device is lost or the process is about to end; the next operation will report it.
    }
  }

  bool isCompleted() override {
    if (failure_ != nullptr || is_captured_) return true;
    // Another thread may be capturing a graph, which a query of an event would end otherwise.
    c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    return inner_->isCompleted();
  }
  std::exception_ptr exception() const override { return failure_ != nullptr ? failure_ : inner_->exception(); }

  /// Orders the current stream after the operation.
  void synchronize() override {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    waited_ = true;
    is_captured_ = is_capturing();
    inner_->synchronize();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    // A graph that is being captured does not run, so nothing can be waited for. Its replays run in the captured order.
    if (is_capturing()) {
      synchronize();
      return true;
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    waited_ = true;
    poll_often();
    return inner_->wait(timeout);  // orders the current stream; throws after an error or at the timeout
  }

 private:
  static bool is_capturing() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  /// c10d's own wait sleeps for milliseconds at a time.
  void poll_often() {
    constexpr std::chrono::microseconds kSpin{200}, kNap{50};
    const auto start = Clock::now();
    while (!inner_->isCompleted() && Clock::now() - start < timeout_)
      Clock::now() - start < kSpin ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }

  const WorkPointer inner_;
  const std::chrono::milliseconds timeout_;
  const std::exception_ptr failure_;
  bool waited_ = false;
  bool is_captured_ = false;
};

/// A reduction in NCCL's terms; the tensor shares the operand's memory.
struct Wire {
  at::Tensor tensor;
  ReduceOp op;
};

Wire to_wire(const at::Tensor& operand, const ReduceOp& op) {
  const auto dtype = operand.scalar_type();
  if (dtype == at::kBool) {
    // Bytes that are 0 or 1: any is their maximum, all is their minimum.
    const bool any = op == ReduceOp::SUM || op == ReduceOp::MAX || op == ReduceOp::BOR;
    return {operand.view(at::kByte), any ? ReduceOp::MAX : ReduceOp::MIN};
  }
  TORCH_CHECK(op != ReduceOp::BAND && op != ReduceOp::BOR,
              "NCCL has no kAnd and kOr for integers; move the tensor to the CPU first");
  TORCH_CHECK(dtype != at::kShort, "NCCL does not reduce int16 tensors; convert to int32, or move it to the CPU first");
  if (!operand.is_complex()) return {operand, op};
  TORCH_CHECK(op == ReduceOp::SUM || op == ReduceOp::AVG,
              "NCCL reduces complex tensors by sum and mean only; reduce the real and imaginary parts separately");
  return {at::view_as_real(operand), op};
}

class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  /// Destroying communicators properly needs all ranks, and would wait forever for a lost one.
  ~NcclBackend() override {
    try {
      ProcessGroupNCCL::abort();
    } catch (const std::exception&) {
      // It took too long, and there is nobody left to tell.
    }
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Wire wire = to_wire(tensors.at(0), options.reduceOp);
    Tensors operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    return start([&] { return ProcessGroupNCCL::allreduce(operands, wire_options); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Wire wire = to_wire(tensors.at(0), options.reduceOp);
    Tensors operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    return start([&] { return ProcessGroupNCCL::reduce(operands, wire_options); });
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    Wire to = to_wire(output, options.reduceOp), from = to_wire(input, options.reduceOp);
    auto wire_options = options;
    wire_options.reduceOp = to.op;
    return start([&] { return ProcessGroupNCCL::_reduce_scatter_base(to.tensor, from.tensor, wire_options); });
  }

  // Operations that only move data.
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start([&] { return ProcessGroupNCCL::broadcast(tensors, options); });
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return start([&] { return ProcessGroupNCCL::_allgather_base(output, input, options); });
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return start([&] { return ProcessGroupNCCL::gather(outputs, inputs, options); });
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return start([&] { return ProcessGroupNCCL::scatter(outputs, inputs, options); });
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return start([&] { return ProcessGroupNCCL::alltoall_base(output, input, output_splits, input_splits, options); });
  }

 private:
  /// Connecting the ranks and launching may fail on some ranks only. This is reported as a failure of the operation.
  WorkPointer start(const std::function<WorkPointer()>& operation) {
    try {
      return c10::make_intrusive<NcclWork>(operation(), getOptions()->timeout);
    } catch (...) {
      return c10::make_intrusive<NcclWork>(std::current_exception());
    }
  }
};

/// While it lives, selects c10d's blocking mode for new groups, which only the environment can. Other groups keep their
/// mode.
class BlockingMode {
 public:
  BlockingMode() { c10::utils::set_env(kVariable, "1"); }
  ~BlockingMode() { c10::utils::set_env(kVariable, before_.value_or("0").c_str()); }
  BlockingMode(const BlockingMode&) = delete;
  BlockingMode& operator=(const BlockingMode&) = delete;

 private:
  static constexpr const char* kVariable = "TORCH_NCCL_BLOCKING_WAIT";
  const std::optional<std::string> before_ = c10::utils::get_env(kVariable);
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(c10::DeviceType device, const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int world_size, std::chrono::milliseconds timeout) {
  TORCH_CHECK(device == c10::kCUDA, "tensors are communicated on the CPU and on CUDA, not on ",
              c10::DeviceTypeName(device, /*lower_case=*/true), "; move the tensor first");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  const BlockingMode blocking;
  return c10::make_intrusive<NcclBackend>(store, rank, world_size, options);
}

std::string gpu_name(c10::Device device) {
  if (!device.is_cuda()) return "";
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  std::string name = "GPU-";
  for (const char byte : properties->uuid.bytes) {
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(byte));
    name += digits.data();
  }
  // NCCL takes ranks with different ones for different machines, so there they may use one GPU: to test several ranks.
  if (const auto host = c10::utils::get_env("NCCL_HOSTID")) name += " of host " + *host;
  return name;
}

}  // namespace lockstep::nccl_engine
