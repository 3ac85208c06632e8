#include "collectives/gloo/gloo_backend.h"

#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace lockstep::gloo_engine {
namespace {

using c10d::ReduceOp;

/// A reduction whose operands travel in another form: prepared before, finished on the waiting thread after.
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

/// How Gloo is asked for a reduction that it does not know.
struct Wire {
  at::Tensor tensor;  ///< what Gloo reduces; shares storage with the operand where it can
  ReduceOp op;
  std::function<void(at::Tensor)> restore;  ///< brings the result home into the operand; may be empty
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
                "Gloo reduces complex tensors by sum and mean only; reduce real and "
                "imaginary parts on their own instead");
    wire.tensor = at::view_as_real(operand);
  }
  if (mean)
    wire.restore = [operand, world_size](const at::Tensor&) {
      // ATen's complex division rounds more than once.
      (operand.is_complex() ? at::view_as_real(operand) : operand).div_(world_size);
    };
  return wire;
}

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    Wire wire = to_wire(tensors.at(0), options.reduceOp, getSize());
    std::vector<at::Tensor> operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    return finish_with(ProcessGroupGloo::allreduce(operands, wire_options), wire);
  }

  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    Wire wire = to_wire(tensors.at(0), options.reduceOp, getSize());
    std::vector<at::Tensor> operands{wire.tensor};
    auto wire_options = options;
    wire_options.reduceOp = wire.op;
    return finish_with(ProcessGroupGloo::reduce(operands, wire_options), wire);
  }

  /// Gloo's own takes fewer dtypes and operations; reducing everything gives the bits all_reduce gives.
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> all{input.clone()};
    c10d::AllreduceOptions all_options;
    all_options.reduceOp = options.reduceOp;
    all_options.timeout = options.timeout;
    auto work = allreduce(all, all_options);
    return c10::make_intrusive<ConvertedWork>(std::move(work), [this, output, reduced = all[0]] {
      output.view(-1).copy_(reduced.view({getSize(), -1})[getRank()]);
    });
  }

 private:
  static c10::intrusive_ptr<c10d::Work> finish_with(c10::intrusive_ptr<c10d::Work> work, const Wire& wire) {
    if (!wire.restore) return work;
    return c10::make_intrusive<ConvertedWork>(std::move(work), [wire] { wire.restore(wire.tensor); });
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<GlooBackend>(store, rank, world_size, options);
}

}  // namespace lockstep::gloo_engine
