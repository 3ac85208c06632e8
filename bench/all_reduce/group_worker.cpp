// A rank of a lockstep::Group under test, on the backend that `--backend` names.

#include <cstdio>
#include <stdexcept>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "worker.h"
#include "workers/serve.h"

namespace lockstep::bench {
namespace {

/// Whether the group's engine has memory of its own, in which operations work in place.
bool hands_out_memory(const Group& group) { return group.backend() == "shm"; }

class GroupEngine : public Engine {
 public:
  explicit GroupEngine(Group group) : group_(std::move(group)) {}
  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  std::string version() const override {
    return group_.backend() == "gloo" ? "LibTorch " TORCH_VERSION "'s Gloo"
                                      : group_.backend() + ", LibTorch " TORCH_VERSION;
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
        input_ = view(input, {ranks, share}), output_ = view(output, {share});
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
  Operation operation_ = Operation::kAllReduce;
  torch::Tensor input_;
  torch::Tensor output_;
};

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  try {
    lockstep::Context context(argc, argv,
                              {.backend = lockstep::bench::argument(argc, argv, "--backend"), .announce = false});
    lockstep::bench::GroupEngine engine(context.group());
    return lockstep::bench::serve(engine, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "group_worker: %s\n", error.what());
    return 1;
  }
}
