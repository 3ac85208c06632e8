// A Trainer of a network with a batch norm on machines that come and go: island_trainer FOLDER EPOCHS SYNC_EVERY
// PAUSE_MS [FRAGMENTS OVERLAP]. Each machine appends a line for each epoch to FOLDER/machine_<n>.txt: its number, the
// hash of parameters and averaged buffers, and the loss.
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

/// Points of a curve.
class Curve : public lockstep::Dataset {
 public:
  int64_t size() const override { return 240; }
  lockstep::Batch get(at::ArrayRef<int64_t> indices) const override {
    const torch::Tensor x = 0.01 * torch::tensor(indices, torch::kLong).to(torch::kFloat).unsqueeze(1);
    return {torch::cat({x, torch::ones_like(x)}, 1), torch::sin(x)};
  }
};

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    const std::string folder = argv[1];
    const int epochs = std::atoi(argv[2]), sync_every = std::atoi(argv[3]), pause = std::atoi(argv[4]);
    const int fragments = argc > 5 ? std::atoi(argv[5]) : 1, overlap = argc > 6 ? std::atoi(argv[6]) : 0;
    lockstep::Context context({.seed = 1});
    lockstep::DataLoader train(Curve(), lockstep::island_shard(context), {.batch_size = 8});
    lockstep::DataLoader test(Curve(), context, {.batch_size = 24, .exactly_once = true});
    torch::nn::Sequential net(torch::nn::Linear(2, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 1));
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    lockstep::Trainer trainer(
        net.ptr(), optimizer, context,
        {.epochs = epochs,
         .diloco = lockstep::DiLoCoOptions{.sync_every = sync_every, .fragments = fragments, .overlap_steps = overlap},
         .folder = folder + "/checkpoints",
         .progress = false});
    lockstep::Metrics metrics;
    lockstep::Mean& error = metrics.add("error", lockstep::Mean());
    trainer.evaluate_on(test, metrics, [&](lockstep::Batch& batch) {
      error.update(torch::mse_loss(net->forward(batch.data), batch.target), batch.data.size(0));
    });
    const std::string own = folder + "/machine_" + std::to_string(lockstep::island().number) + ".txt";
    trainer.on_epoch([&](const lockstep::EpochResult& epoch) {
      if (context.rank() != 0) return;
      lockstep::StateDict shared;
      for (const auto& item : lockstep::state_dict(*net))
        if (item.value().is_floating_point()) shared.insert(item.key(), item.value());
      std::ofstream(own, std::ios::app) << epoch.epoch << ' ' << lockstep::hash(shared) << ' ' << epoch.loss
                                        << std::endl;
    });
    trainer.fit(train, [&](lockstep::Batch& batch) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      return torch::mse_loss(net->forward(batch.data), batch.target);
    });
    return 0;
  });
}
