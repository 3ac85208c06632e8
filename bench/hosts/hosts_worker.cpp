// A rank of bench_hosts.py: all-reduces of several sizes between the ranks of several machines. Rank 0 prints one line
// for each size: bytes, the median and the fastest time in microseconds.

#include <algorithm>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "base/clock.h"
#include "base/environment.h"
#include "collectives/gloo/gloo_backend.h"
#include "collectives/hierarchical/hierarchical_backend.h"
#include "context/open_store.h"
#include "rendezvous/world.h"

namespace lockstep::bench {
namespace {

/// A group of Lockstep's, or an engine alone.
struct System {
  int rank, world_size;
  std::function<torch::Tensor(int64_t elements)> allocate;
  std::function<void(torch::Tensor&)> all_reduce;
  std::function<void()> barrier;
};

void measure(const System& system, int64_t bytes, double seconds) {
  torch::Tensor data = system.allocate(bytes / 4);
  const double sum = system.world_size * (system.world_size + 1) / 2.0;
  data.fill_(system.rank + 1);
  system.all_reduce(data);
  if (data.min().item<double>() != sum || data.max().item<double>() != sum)
    throw std::runtime_error("the sum of " + std::to_string(bytes) + " bytes is wrong");
  // So many rounds as fit into the time, by the slowest rank's first ones.
  data.zero_();
  torch::Tensor once = torch::zeros({1});
  const auto began = Clock::now();
  for (int i = 0; i < 3; ++i) system.all_reduce(data);
  once[0] = seconds_since(began) / 3;
  system.all_reduce(once);
  const int rounds = std::clamp(static_cast<int>(seconds / (once.item<double>() / system.world_size)), 5, 2000);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = Clock::now();
    system.all_reduce(data);
    times.push_back(seconds_since(start) * 1e6);
  }
  system.barrier();
  std::sort(times.begin(), times.end());
  if (system.rank == 0)
    std::printf("%lld %.1f %.1f\n", static_cast<long long>(bytes), times[times.size() / 2], times.front());
}

void run_sizes(const System& system, int argc, char** argv) {
  torch::NoGradGuard no_grad;
  torch::set_num_threads(1);
  for (int i = 3; i < argc; ++i) measure(system, std::stoll(argv[i]), std::stod(argv[2]));
}

/// An engine without a Group: c10d's Gloo, or the hierarchical engine also where it would leave it to Gloo's.
c10::intrusive_ptr<c10d::Backend> make_engine(const std::string& system, const World& world) {
  constexpr std::chrono::minutes kTimeout(2);
  const auto store = open_store(world, std::chrono::seconds(60));
  if (system == "c10d")
    return gloo_engine::make_plain_backend(store, world.rank, world.world_size, local_address(world), kTimeout);
  return hierarchical_engine::make_backend(store, world.rank, world.world_size,
                                           {.machine = local_address(world),
                                            .address = local_address(world),
                                            .timeout = kTimeout,
                                            .join_timeout = kTimeout,
                                            .for_group = false});
}

int run(int argc, char** argv) {
  const std::string name = argv[1];
  if (name == "c10d" || name == "hierarchical_always") {
    const World world = discover_world(Environment::from_process());
    const auto engine = make_engine(name, world);
    const auto all_reduce = [&](torch::Tensor& data) {
      std::vector<torch::Tensor> tensors{data};
      engine->allreduce(tensors, {})->wait();
    };
    const auto allocate = [](int64_t elements) { return torch::empty({elements}); };
    const auto barrier = [&] { engine->barrier({})->wait(); };
    run_sizes({world.rank, world.world_size, allocate, all_reduce, barrier}, argc, argv);
    barrier();
    return 0;
  }
  Context context({.backend = argv[1], .announce = false});
  const Group& group = context.group();
  run_sizes(
      {group.rank(), group.world_size(), [&](int64_t elements) { return group.allocate(elements, torch::kFloat); },
       [&](torch::Tensor& data) { group.all_reduce(data); }, [&] { group.barrier(); }},
      argc, argv);
  return 0;
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: hosts_worker c10d|gloo|hierarchical SECONDS BYTES...\n");
    return 2;
  }
  try {
    return lockstep::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hosts_worker: %s\n", error.what());
    return 1;
  }
}
