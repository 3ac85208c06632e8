// A training whose bits are compared: island_net FOLDER STEPS SYNC_EVERY FRAGMENTS OVERLAP WIRE PAUSE_MS [ENDS_AT].
// Machines of a rank each, with --islands or without, read the same data by their numbers. With ENDS_AT the program
// saves and ends after that step, without finish(); one that is started again goes on from there. Each machine writes
// FOLDER/machine_<n>.json.
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(7, 19))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(19))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(19, 5))};
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};
TORCH_MODULE(Net);

lockstep::Wire wire_of(const std::string& name) {
  return name == "int8" ? lockstep::Wire::kInt8 : lockstep::Wire::kFloat32;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    const std::string folder = argv[1], wire = argv[6];
    const int64_t steps = std::atoll(argv[2]), pause = std::atoll(argv[7]);
    const int64_t ends_at = argc > 8 ? std::atoll(argv[8]) : steps;
    lockstep::Context context({.seed = 1});
    const lockstep::Island island = lockstep::island();
    const int64_t machine = island.count > 1 ? island.number : context.rank();
    (void)lockstep::island_shard(context);  // the data is numbered by machines
    Net net;
    lockstep::DistributedDataParallel model(net, context.group().on_this_machine());
    lockstep::DiLoCo diloco(model, context,
                            {.sync_every = std::atoll(argv[3]),
                             .fragments = std::atoll(argv[4]),
                             .overlap_steps = std::atoll(argv[5]),
                             .wire = wire_of(wire),
                             .error_feedback = wire == "int8"});
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    const std::string own = folder + "/machine_" + std::to_string(machine);
    lockstep::Checkpointer checkpointer(own, context.group().on_this_machine(), {.asynchronous = false});
    constexpr auto kEachRank = lockstep::Checkpointer::Scope::kEachRank;
    if (island.count > 1) {
      checkpointer.add("model", *net, kEachRank).add("optimizer", optimizer, kEachRank).add("diloco", diloco);
      checkpointer.resume();
    }
    for (int64_t step = checkpointer.resumed_step(); step < steps; ++step) {
      torch::manual_seed(1000 * step + machine);
      const torch::Tensor x = torch::randn({6, 7});
      optimizer.zero_grad();
      (model(x) - x.narrow(1, 0, 5).square()).square().mean().backward();
      optimizer.step();
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      const bool has_set = diloco.step();
      if (step + 1 == ends_at && ends_at < steps) {
        checkpointer.save(step + 1);
        return 0;
      }
      if (has_set && island.count > 1 && pause > 0) checkpointer.save(step + 1);
    }
    diloco.finish();
    lockstep::StateDict parameters, buffers;
    for (const auto& item : net->named_parameters()) parameters.insert(item.key(), item.value().detach());
    for (const auto& item : net->named_buffers())
      if (item.value().is_floating_point()) buffers.insert(item.key(), item.value());
    std::ofstream(own + ".json") << "{\"hash\": \"" << lockstep::hash(parameters) << "\", \"buffers\": \""
                                 << lockstep::hash(buffers) << "\", \"rounds\": " << diloco.stats().rounds << "}\n";
    return 0;
  });
}
