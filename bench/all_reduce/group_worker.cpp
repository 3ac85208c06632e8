// A rank of a lockstep::Group under test, on the backend that `--backend` names.

#include <cstdio>
#include <stdexcept>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/gloo/gloo_backend.h"
#include "collectives/group_state.h"
#include "worker.h"
#include "workers/serve.h"

namespace lockstep::bench {
namespace {

/// c10d's own engine, without what Lockstep adds to it.
constexpr const char* kLibTorchsGloo = "gloo-of-libtorch";

/// The same ranks over that engine.
Group with_libtorchs_gloo(const Group& ranks) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("libtorch", state_of(ranks).store);
  const auto engine = [](const c10::intrusive_ptr<c10d::Store>& meeting, int rank, int world_size) {
    return gloo_engine::make_plain_backend(meeting, rank, world_size, "127.0.0.1", std::chrono::minutes(1));
  };
  return make_group(store, ranks.rank(), ranks.world_size(), {.cpu = engine, .device = nullptr});
}

/// Whether the group's engine has memory of its own, in which operations work in place.
bool hands_out_memory(const Group& group) { return group.backend() != "gloo"; }

class GroupEngine : public Engine {
 public:
  GroupEngine(Group group, std::string name) : group_(std::move(group)), name_(std::move(name)) {}
  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  std::string version() const override {
    return name_ == kLibTorchsGloo ? "LibTorch " TORCH_VERSION "'s Gloo" : name_ + ", LibTorch " TORCH_VERSION;
  }

  std::string why_not(const Case& wanted) const override {
    if (wanted.placement == Placement::kResident && !hands_out_memory(group_)) return "hands out no memory";
    return "";
  }

  std::shared_ptr<std::byte> allocate_resident(size_t bytes) override {
    torch::Tensor tensor = group_.allocate(static_cast<int64_t>(bytes), torch::kByte);
    auto* memory = static_cast<std::byte*>(tensor.data_ptr());
    return {memory, [tensor](std::byte*) {}};
  }

  void prepare(const Case& wanted, std::byte* input, std::byte* output) override {
    const auto type = wanted.dtype == Dtype::kFp32 ? torch::kFloat : torch::kBFloat16;
    const auto ranks = static_cast<int64_t>(world_size());
    const auto share = static_cast<int64_t>(wanted.share(world_size()));
    const auto view = [&](std::byte* at, torch::IntArrayRef shape) { return torch::from_blob(at, shape, type); };
    operation_ = wanted.operation;
    switch (operation_) {
      case Operation::kAllReduce:
      case Operation::kBroadcast:
        output_ = view(output, {static_cast<int64_t>(wanted.items(world_size()))});
        break;
      case Operation::kAllGather:
        input_ = view(input, {share}), output_ = view(output, {ranks, share});
        break;
      case Operation::kReduceScatter:
        input_ = view(input, {ranks * share}), output_ = view(output, {share});  // LibTorch's Gloo takes no other shape
        break;
    }
  }

  void run() override {
    switch (operation_) {
      case Operation::kAllReduce:
        group_.all_reduce(output_);
        break;
      case Operation::kBroadcast:
        group_.broadcast(output_);
        break;
      case Operation::kAllGather:
        group_.all_gather_into_tensor(output_, input_);
        break;
      case Operation::kReduceScatter:
        group_.reduce_scatter_tensor(output_, input_);
        break;
    }
  }

  void barrier() override { group_.barrier(); }

 private:
  const Group group_;
  const std::string name_;
  Operation operation_ = Operation::kAllReduce;
  torch::Tensor input_;
  torch::Tensor output_;
};

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  try {
    using namespace lockstep::bench;
    const std::string name = argument(argc, argv, "--backend");
    const bool libtorchs = name == kLibTorchsGloo;
    lockstep::Context context(argc, argv, {.backend = libtorchs ? "shm" : name, .announce = false});
    GroupEngine engine(libtorchs ? with_libtorchs_gloo(context.group()) : context.group(), name);
    return lockstep::bench::serve(engine, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "group_worker: %s\n", error.what());
    return 1;
  }
}
