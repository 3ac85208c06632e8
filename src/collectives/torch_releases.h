#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// The differences between the releases of LibTorch with which this library is compiled, 2.11 to 2.15.

namespace lockstep {

/// What c10d::Backend::reconfigure() asks for.
struct Regrouping {
  int64_t uuid = 0;
  std::vector<std::string> handles;  ///< by new rank
  std::optional<std::chrono::milliseconds> timeout;
};

/// c10d::Backend with the operations that LibTorch has added for torch.distributed to call.
class EveryReleasesBackend : public c10d::Backend {
 public:
  using Backend::Backend;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  /// gather() into the rows of one tensor.
  c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& options) override {
    std::vector<at::Tensor> inputs{input};
    std::vector<std::vector<at::Tensor>> outputs;
    if (options.rootRank == rank_) {
      TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "gather_single: the output has ", output.numel(),
                        " elements, and ", size_, " inputs of ", input.numel(), " are gathered");
      outputs.push_back(output.view({size_, input.numel()}).unbind(0));
      inputs.front() = input.reshape({-1});
    }
    return gather(outputs, inputs, options);
  }
#endif
};

/// `Base`, an engine, as one whose ranks can form another group in place: c10d offers that from LibTorch 2.14 on, where
/// a backend's rank and size can change. Before 2.14 nothing calls what the engine defines for it.
template <typename Base>
class Regroups : public Base {
 public:
  using Base::Base;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle(); }
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) override {
    Regrouping regrouping{.uuid = options.uuid, .handles = {}, .timeout = options.timeout};
    std::visit([&](const auto& handles) { regrouping.handles.assign(handles.begin(), handles.end()); },
               options.handles);
    // A set has the same order on all ranks only once it is sorted: by the ranks that made the handles.
    if (options.handles.index() == 0) std::sort(regrouping.handles.begin(), regrouping.handles.end());
    regroup(std::move(regrouping));
    return c10::make_intrusive<Done>();
  }
#endif

 protected:
  /// This process's handle, which stays the same. Handles sort by the rank at the time of the first call.
  virtual std::string handle() const = 0;
  /// Returns when the new group is formed; throws Error if it cannot be, and then the old one is as it was.
  virtual void regroup(Regrouping regrouping) = 0;

  void become([[maybe_unused]] int rank, [[maybe_unused]] int size) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
    this->rank_ = rank;
    this->size_ = size;
#endif
  }

 private:
  class Done final : public c10d::Work {
   public:
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
};

}  // namespace lockstep
