// A training on this rank's GPU that saves to the launcher's memory in every step: trains_on_gpu FOLDER STEPS. Each
// rank prints "step K" when the first and every tenth step is done; rank 0 ends with a hash of its model and optimizer.
//
// Ranks that share a GPU pretend to be machines (device_ranks.h), so that NCCL connects them.

#include <cstdio>
#include <cstdlib>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "gpu/pretend.h"

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    const lockstep::Context context({.seed = 7});
    lockstep::testing::pretend_to_be_a_machine(context.rank());
    const int64_t steps = std::atoll(argv[2]);
    const at::Device device = lockstep::device();
    torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::ReLU(), torch::nn::Linear(512, 512),
                              torch::nn::ReLU(), torch::nn::Dropout(0.2), torch::nn::Linear(512, 8));
    net->to(device);
    lockstep::DistributedDataParallel<torch::nn::Sequential> model(net, context);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    lockstep::Checkpointer checkpointer(argv[1], context.group(), {.every_steps = 50, .memory_every_n_steps = 1});
    checkpointer.add("model", model).add("optimizer", optimizer);
    checkpointer.resume();
    for (int64_t step = checkpointer.resumed_step(); step < steps;) {
      const auto key = static_cast<double>(step * context.world_size() + context.rank());
      const at::Tensor data = at::sin(at::arange(32 * 64, device) * 0.37 + key).view({32, 64});
      const at::Tensor target = at::cos(at::arange(32 * 8, device) * 0.11 + key).view({32, 8});
      optimizer.zero_grad();
      torch::mse_loss(net->forward(data), target).backward();
      optimizer.step();
      checkpointer.step(++step);
      if (step % 10 == 0) std::printf("step %lld\n", static_cast<long long>(step));
      std::fflush(stdout);
    }
    checkpointer.finish();
    lockstep::StateDict state;
    for (const auto& item : lockstep::state_dict(*net)) state.insert(item.key(), item.value().cpu());
    for (const auto& item : lockstep::state_dict(optimizer))
      state.insert("optimizer." + item.key(), item.value().cpu());
    if (context.is_main()) std::printf("hash %s\n", lockstep::hash(state).c_str());
    return 0;
  });
}
