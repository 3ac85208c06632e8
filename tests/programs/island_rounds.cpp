// Counts samples by DiLoCo: island_rounds FOLDER STEPS SYNC_EVERY PAUSE_MS [NAN_MACHINE NAN_STEP [FRAGMENTS OVERLAP]];
// with NAN_MACHINE "all" the parameters of all machines are not finite from that step on. Each sample of each
// machine has a number of its own in each fragment of the model, to which its step adds 1. The outer copy becomes the
// mean over the machines of a round, so a sample that counted once, in a round of k machines, has 1 / k in the end, and
// 0 if its step was one of the OVERLAP ones after a turn: what is learned then is dropped.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

struct NumbersImpl : torch::nn::Module {
  NumbersImpl(int64_t count, int64_t fragments) {
    for (int64_t i = 0; i < fragments; ++i)
      numbers.push_back(register_parameter("numbers" + std::to_string(i), torch::zeros({count})));
  }
  torch::Tensor forward(int64_t at) {
    torch::Tensor sum = -numbers.front()[at];
    for (size_t i = 1; i < numbers.size(); ++i) sum = sum - numbers[i][at];
    return sum;
  }
  std::vector<torch::Tensor> numbers;
};
TORCH_MODULE(Numbers);

/// How often each value occurs, from the first part of `count` numbers on.
std::string counts_of(const torch::Tensor& numbers) {
  std::map<std::string, int> counts;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4f", numbers[i].item<double>());
    ++counts[text];
  }
  std::string json;
  for (const auto& [value, count] : counts)
    json += (json.empty() ? "\"" : ", \"") + value + "\": " + std::to_string(count);
  return "{" + json + "}";
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(argc, argv, [&] {
    const std::string folder = argc > 1 ? argv[1] : ".";
    const int64_t steps = std::atoll(argv[2]), sync_every = std::atoll(argv[3]), pause = std::atoll(argv[4]);
    const bool all_nan = argc > 6 && std::string(argv[5]) == "all";
    const int nan_machine = argc > 6 && !all_nan ? std::atoi(argv[5]) : -1;
    const int64_t nan_step = argc > 6 ? std::atoll(argv[6]) : 0;
    lockstep::Context context({.seed = 1});
    const lockstep::Island island = lockstep::island();
    (void)lockstep::island_shard(context);  // the samples are numbered by machines
    const int64_t first = island.number * steps;
    const int64_t fragments = argc > 7 ? std::atoll(argv[7]) : 1, overlap = argc > 8 ? std::atoll(argv[8]) : 0;
    Numbers net(island.count * steps, fragments);
    lockstep::DistributedDataParallel model(net, context);
    lockstep::DiLoCo diloco(model, context,
                            {.sync_every = sync_every,
                             .fragments = fragments,
                             .overlap_steps = overlap,
                             .mixing = 0,
                             .outer_lr = 1,
                             .outer_momentum = 0});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1));
    const std::string own = folder + "/machine_" + std::to_string(island.number);
    lockstep::Checkpointer checkpointer(own, context.group(), {.asynchronous = false});
    constexpr auto kEachRank = lockstep::Checkpointer::Scope::kEachRank;
    checkpointer.add("model", *net, kEachRank).add("diloco", diloco);
    checkpointer.resume();
    for (int64_t step = checkpointer.resumed_step(); step < steps; ++step) {
      optimizer.zero_grad();
      model(first + step).backward();
      optimizer.step();
      if ((all_nan && step + 1 >= nan_step) || (island.number == nan_machine && step + 1 == nan_step)) {
        const at::NoGradGuard no_grad;
        for (const auto& numbers : net->numbers) numbers[first].fill_(NAN);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      if (diloco.step()) checkpointer.save(step + 1);
      if (context.stop_requested()) {
        checkpointer.save(step + 1);
        return lockstep::kPreempted;
      }
    }
    diloco.finish();
    if (context.rank() != 0) return 0;
    std::ofstream figures(own + ".json");
    figures << "{\"rounds\": " << diloco.stats().rounds << ", \"hash\": \""
            << lockstep::hash(lockstep::state_dict(*net)) << "\", \"bytes_sent\": " << diloco.stats().bytes_sent
            << ", \"wait_seconds\": " << diloco.stats().wait_seconds << ", \"machines\": ";
    const auto write = [&](const torch::Tensor& numbers) {
      for (int machine = 0; machine < island.count; ++machine)
        figures << (machine > 0 ? ", " : "[") << counts_of(numbers.detach().narrow(0, machine * steps, steps));
      figures << "]";
    };
    write(net->numbers.front());
    for (size_t i = 0; i < net->numbers.size(); ++i) {
      figures << (i > 0 ? ", " : ", \"fragments\": [");
      write(net->numbers[i]);
    }
    figures << "]}\n";
    return 0;
  });
}
