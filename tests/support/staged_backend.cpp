#include "support/staged_backend.h"

#include <utility>

#include <torch/torch.h>

namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

/// Results that go back to the device.
using Returns = std::vector<std::pair<at::Tensor, at::Tensor>>;  // (on the device, on the CPU)

class StagedWork final : public c10d::Work {
 public:
  StagedWork(WorkPointer inner, Returns returns) : inner_(std::move(inner)), returns_(std::move(returns)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    at::NoGradGuard no_grad;
    for (const auto& [on_device, on_cpu] : std::exchange(returns_, {})) on_device.copy_(on_cpu);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  const WorkPointer inner_;
  Returns returns_;
};

class StagedBackend final : public c10d::Backend {
 public:
  explicit StagedBackend(c10::intrusive_ptr<c10d::Backend> cpu)
      : Backend(cpu->getRank(), cpu->getSize()), cpu_(std::move(cpu)) {}
  const std::string getBackendName() const override { return "staged"; }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Staged staged;
    Tensors both = staged.both_ways(tensors);
    return staged.work(cpu_->allreduce(both, options));
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Staged staged;
    Tensors both = staged.both_ways(tensors);
    return staged.work(cpu_->broadcast(both, options));
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Staged staged;
    Tensors both = staged.both_ways(tensors);
    return staged.work(cpu_->reduce(both, options));
  }
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Staged staged;
    std::vector<Tensors> to;
    for (const Tensors& rows : outputs) to.push_back(staged.both_ways(rows));
    Tensors from = staged.there(inputs);
    return staged.work(cpu_->gather(to, from, options));
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Staged staged;
    std::vector<Tensors> from;
    for (const Tensors& rows : inputs) from.push_back(staged.there(rows));
    Tensors to = staged.both_ways(outputs);
    return staged.work(cpu_->scatter(to, from, options));
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Staged staged;
    at::Tensor to = staged.both_ways({output}).front(), from = input.cpu();
    return staged.work(cpu_->_allgather_base(to, from, options));
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    Staged staged;
    at::Tensor to = staged.both_ways({output}).front(), from = input.cpu();
    return staged.work(cpu_->_reduce_scatter_base(to, from, options));
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    Staged staged;
    at::Tensor to = staged.both_ways({output}).front(), from = input.cpu();
    return staged.work(cpu_->alltoall_base(to, from, output_splits, input_splits, options));
  }

 private:
  /// The copies of one operation.
  class Staged {
   public:
    /// Copies of what the operation reads.
    Tensors there(const Tensors& tensors) {
      Tensors copies;
      for (const at::Tensor& tensor : tensors) {
        TORCH_CHECK(!tensor.is_cpu(), "the engine of a device got a tensor on the CPU");
        copies.push_back(tensor.detach().cpu());
      }
      return copies;
    }
    /// Copies of what it writes, too.
    Tensors both_ways(const Tensors& tensors) {
      Tensors copies = there(tensors);
      for (size_t i = 0; i < tensors.size(); ++i) returns_.emplace_back(tensors[i].detach(), copies[i]);
      return copies;
    }
    WorkPointer work(WorkPointer inner) { return c10::make_intrusive<StagedWork>(std::move(inner), returns_); }

   private:
    Returns returns_;
  };

  const c10::intrusive_ptr<c10d::Backend> cpu_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_staged_backend(c10::intrusive_ptr<c10d::Backend> cpu) {
  return c10::make_intrusive<StagedBackend>(std::move(cpu));
}

}  // namespace lockstep::testing
