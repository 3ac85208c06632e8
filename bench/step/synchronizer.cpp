#include "synchronizer.h"

#include <algorithm>
#include <stdexcept>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <lockstep/diloco.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/kept_memory.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/gloo/gloo_backend.h"

namespace lockstep::bench {
namespace {

/// `make` makes an optimizer from its options.
template <typename Make>
std::unique_ptr<torch::optim::Optimizer> optimizer_named(const std::string& name, const Make& make) {
  if (name == "sgd") return make(torch::optim::SGDOptions(1e-3).momentum(0.9));
  if (name == "adamw") return make(torch::optim::AdamWOptions(1e-4));
  throw std::invalid_argument("no optimizer is named " + name);
}

/// `parameters`: tensors, or the model that trains them.
template <typename Parameters>
std::unique_ptr<torch::optim::Optimizer> fused_optimizer(const std::string& name, Parameters& parameters,
                                                         ZeroRedundancyOptions options = {}) {
  return optimizer_named(name, [&]<typename Options>(Options defaults) -> std::unique_ptr<torch::optim::Optimizer> {
    using Optimizer = decltype(ZeroRedundancyOptimizer(parameters, std::move(defaults), options));
    return std::make_unique<Optimizer>(parameters, std::move(defaults), options);
  });
}

class Fused : public Synchronizer {
 public:
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                          const std::vector<at::Tensor>& parameters) override {
    return fused_optimizer(name, parameters);
  }
};

/// Nothing but the memory that DistributedDataParallel keeps for later tensors.
class Kept : public Synchronizer {
 public:
  void before_forward() override { memory_.end_step(); }

 private:
  KeptMemory memory_;
};

class Lockstep : public Synchronizer {
 public:
  Lockstep(const std::shared_ptr<torch::nn::Module>& model, const Group& group, const CommHookPtr& hook = nullptr)
      : replica_(model, group) {
    replica_.register_comm_hook(hook);
  }

 protected:
  DistributedDataParallel<std::shared_ptr<torch::nn::Module>> replica_;
};

class LockstepSharded : public Lockstep {
 public:
  LockstepSharded(const std::shared_ptr<torch::nn::Module>& model, const Group& group, bool shared_parameters)
      : Lockstep(model, group), shared_parameters_(shared_parameters) {}
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                          const std::vector<at::Tensor>& /*parameters*/) override {
    const Replica& model = replica_;
    return fused_optimizer(name, model, {.shared_parameters = shared_parameters_});
  }

 private:
  const bool shared_parameters_;
};

class LockstepFullySharded : public Fused {
 public:
  LockstepFullySharded(const std::shared_ptr<Model>& model, const Group& group, const FullyShardedOptions& options)
      : model_(model, group, options) {}
  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                          const std::vector<at::Tensor>& /*parameters*/) override {
    const FullySharded& model = model_;
    return fused_optimizer(name, model);
  }
  std::vector<at::Tensor> values(const std::vector<at::Tensor>& /*parameters*/) override {
    std::vector<at::Tensor> values;
    for (const auto& item : model_.state_dict()) values.push_back(item.value());
    return values;
  }
  int64_t sent_bytes() const override { return model_.stats().sent_bytes; }

 private:
  FullySharded model_;
};

/// Machines that exchange int8 every 100 steps.
class LockstepDiLoCo : public Synchronizer {
 public:
  LockstepDiLoCo(const std::shared_ptr<torch::nn::Module>& model, const Group& group, DiLoCoOptions options)
      : replica_(model, group.on_this_machine()), diloco_(replica_, group, std::move(options)) {}
  void after_step() override { diloco_.step(); }
  int64_t sent_bytes() const override { return diloco_.stats().bytes_sent; }

 private:
  DistributedDataParallel<std::shared_ptr<torch::nn::Module>> replica_;
  DiLoCo diloco_;
};

/// What PyTorch's Python class does around its reducer, in C++: the fairest peer.
class C10dReducer : public Synchronizer {
 public:
  C10dReducer(const std::shared_ptr<torch::nn::Module>& model, const Group& ranks, const std::string& folder)
      : buffers_(model->buffers()), group_(make_group(ranks, folder)) {
    const std::vector<at::Tensor> parameters = model->parameters();
    c10d::verify_params_across_processes(group_, parameters, {});
    std::vector<at::Tensor> all;
    for (const auto& tensor : parameters) all.push_back(tensor.detach());
    all.insert(all.end(), buffers_.begin(), buffers_.end());
    c10d::broadcast_coalesced(group_, all, size_t{250} << 20, /*rank=*/0);
    std::unordered_map<size_t, std::string> names;
    for (const auto& item : model->named_parameters()) names.emplace(names.size(), item.key());
    constexpr size_t kFirst = size_t{1} << 20, kOthers = size_t{25} << 20;
    auto plan = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, {kFirst, kOthers}));
    std::reverse(plan.begin(), plan.end());
    reducer_ = std::make_unique<c10d::Reducer>(
        parameters, std::move(plan), group_, std::vector<bool>(parameters.size(), false), static_cast<int64_t>(kOthers),
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true, std::move(names),
        static_cast<int64_t>(kFirst), /*skip_all_reduce_unused_params=*/false,
        /*use_python_reducer=*/false, std::vector<int64_t>{});
  }

  void before_forward() override {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
    if (!buffers_.empty()) c10d::broadcast_coalesced(group_, buffers_, size_t{250} << 20, /*rank=*/0);
  }
  void after_forward(const at::Tensor&) override { reducer_->prepare_for_backward({}); }

 private:
  static c10::intrusive_ptr<c10d::ProcessGroup> make_group(const Group& ranks, const std::string& folder) {
    using Type = c10d::ProcessGroup::BackendType;
    auto store = c10::make_intrusive<c10d::FileStore>(folder + "/c10d_store", ranks.world_size());
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, ranks.rank(), ranks.world_size());
    group->setBackend(
        c10::kCPU, Type::GLOO,
        gloo_engine::make_plain_backend(store, ranks.rank(), ranks.world_size(), "127.0.0.1", std::chrono::minutes(1)));
    group->setDefaultBackend(Type::GLOO);
    return group;
  }

  std::vector<at::Tensor> buffers_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

}  // namespace

std::unique_ptr<torch::optim::Optimizer> Synchronizer::make_optimizer(const std::string& name,
                                                                      const std::vector<at::Tensor>& parameters) {
  return optimizer_named(name, [&]<typename Options>(Options defaults) -> std::unique_ptr<torch::optim::Optimizer> {
    using Optimizer = typename detail::OptimizerOf<Options>::type;
    return std::make_unique<Optimizer>(parameters, std::move(defaults));
  });
}

std::unique_ptr<Synchronizer> attach(const std::string& system, const std::shared_ptr<Model>& model, const Group& group,
                                     const std::string& folder) {
  if (system == "side_by_side") return std::make_unique<Synchronizer>();
  if (system == "side_by_side_kept" || system == "one_process") return std::make_unique<Kept>();
  if (system == "side_by_side_fused") return std::make_unique<Fused>();
  if (system == "lockstep_sharded") return std::make_unique<LockstepSharded>(model, group, /*shared_parameters=*/false);
  if (system == "lockstep_shared") return std::make_unique<LockstepSharded>(model, group, /*shared_parameters=*/true);
  if (system == "lockstep_fully_sharded")
    return std::make_unique<LockstepFullySharded>(model, group, FullyShardedOptions{});
  if (system == "lockstep_fully_sharded_kept")
    return std::make_unique<LockstepFullySharded>(model, group, FullyShardedOptions{.keep_gathered = true});
  if (system == "lockstep") return std::make_unique<Lockstep>(model, group);
  if (system == "lockstep_bf16")  // the hook on every rank's gradients, to compare with
    return std::make_unique<Lockstep>(model, group, bf16_compress_hook());
  if (system == "lockstep_bf16_between")
    return std::make_unique<Lockstep>(model, group, between_machines_hook(bf16_compress_hook()));
  if (system == "lockstep_power_sgd_between")
    return std::make_unique<Lockstep>(model, group, between_machines_hook(power_sgd_hook({.start_iter = 2})));
  if (system == "lockstep_diloco")
    return std::make_unique<LockstepDiLoCo>(model, group, DiLoCoOptions{.wire = Wire::kInt8});
  if (system == "lockstep_diloco_overlap")
    return std::make_unique<LockstepDiLoCo>(model, group,
                                            DiLoCoOptions{.fragments = 4, .overlap_steps = 20, .wire = Wire::kInt8});
  if (system == "c10d_reducer_gloo") return std::make_unique<C10dReducer>(model, group, folder);
  throw std::invalid_argument("no system is named " + system);
}

}  // namespace lockstep::bench
