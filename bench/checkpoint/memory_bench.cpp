#include "memory_bench.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <vector>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpointer.h>
#include <lockstep/context.h>
#include <lockstep/error.h>
#include <lockstep/replica.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/shm/kernels/stream_copy.h"
#include "step/models.h"

namespace lockstep::bench {
namespace {

using Time = std::chrono::steady_clock;

double since(Time::time_point start) { return std::chrono::duration<double>(Time::now() - start).count(); }

/// Of this thread: what a save takes of a machine on which others compute as well.
double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// A line of /proc/self/status, in MiB.
double resident(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(name + ":", 0) == 0) return std::strtod(line.c_str() + name.size() + 1, nullptr) / 1024;
  return 0;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const MemoryBenchOptions& options, const Replica& replica,
                                                        const Model& model) {
  const torch::optim::AdamWOptions adamw(1e-3);
  if (!options.sharded) return std::make_unique<torch::optim::AdamW>(model.parameters(), adamw);
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
      replica, adamw, ZeroRedundancyOptions{.shared_parameters = true});
}

double state_mebibytes(const Model& model, const torch::optim::Optimizer& optimizer) {
  uint64_t bytes = 0;
  for (const at::Tensor& parameter : model.parameters()) bytes += parameter.nbytes();
  for (const auto& item : state_dict(optimizer)) bytes += item.value().nbytes();
  return static_cast<double>(bytes) / (1 << 20);
}

double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

/// In seconds.
struct Times {
  std::vector<double> with, without;     ///< of steps with a save and without
  std::vector<double> saves, processor;  ///< of the saves

  void add_to(nlohmann::ordered_json& figures) const {
    figures["step_seconds"] = median(without);
    figures["step_with_save_seconds"] = median(with);
    figures["cost"] = median(with) / median(without) - 1;
    figures["least_step_seconds"] = least(without);
    figures["least_step_with_save_seconds"] = least(with);
    figures["cost_of_least"] = least(with) / least(without) - 1;
    figures["save_seconds"] = median(saves);
    figures["least_save_seconds"] = least(saves);
    figures["save_processor_seconds"] = median(processor);
  }
};

/// What no save can do without: one copy of a rank's share of the state, on all ranks at once.
class Floor {
 public:
  explicit Floor(int64_t bytes) : from_(at::ones({bytes}, at::kByte)), to_(at::ones({bytes}, at::kByte)) {}

  void copy(const Group& group) {
    auto* const to = static_cast<std::byte*>(to_.mutable_data_ptr());
    const auto* const from = static_cast<const std::byte*>(from_.const_data_ptr());
    group.barrier();
    auto start = Time::now();
    std::memcpy(to, from, from_.nbytes());
    memcpy_.push_back(since(start));
    group.barrier();
    start = Time::now();
    shm::stream_copy_from_memory(to, from, from_.nbytes());
    past_caches_.push_back(since(start));
  }
  void add_to(nlohmann::ordered_json& figures) const {
    figures["least_memcpy_seconds"] = least(memcpy_);
    figures["least_copy_past_caches_seconds"] = least(past_caches_);
  }

 private:
  const at::Tensor from_, to_;
  std::vector<double> memcpy_, past_caches_;
};

void print(const nlohmann::ordered_json& figures) {
  const auto number = [&](const char* name) { return figures[name].get<double>(); };
  const auto text = [&](const char* name) { return figures[name].get<std::string>(); };
  std::printf(
      "%s, AdamW (%s), %d ranks, %.0f MiB of state: a step takes %.2f ms, with a save to memory %.2f ms (%+.1f %%), at "
      "least %.2f and %.2f ms (%+.1f %%); the save alone %.2f ms, at least %.2f ms, %.2f ms of a processor; a copy "
      "of a rank's share at least %.2f ms by memcpy, %.2f ms past the caches; a rank has %.1f MiB more of its own and "
      "%.1f MiB in the launcher's memory\n",
      text("model").c_str(), text("optimizer").c_str(), figures["ranks"].get<int>(), number("state_mebibytes"),
      1e3 * number("step_seconds"), 1e3 * number("step_with_save_seconds"), 1e2 * number("cost"),
      1e3 * number("least_step_seconds"), 1e3 * number("least_step_with_save_seconds"), 1e2 * number("cost_of_least"),
      1e3 * number("save_seconds"), 1e3 * number("least_save_seconds"), 1e3 * number("save_processor_seconds"),
      1e3 * number("least_memcpy_seconds"), 1e3 * number("least_copy_past_caches_seconds"),
      number("own_memory_mebibytes"), number("shared_memory_mebibytes"));
}

}  // namespace

std::string bench_memory(const MemoryBenchOptions& options) {
  Context context({.seed = 1, .announce = false});
  const auto model = make_model(options.model);
  Replica replica(model, context.group());
  const auto optimizer = make_optimizer(options, replica, *model);
  Checkpointer checkpointer(options.folder + "/memory", context.group(), {.memory_every_n_steps = 1});
  checkpointer.add("model", *model).add("optimizer", *optimizer);
  const Batch batch = make_batch(options.model, context.rank());
  int64_t step = 0;
  Times times;
  const auto run_step = [&](bool save) {
    const auto start = Time::now();
    optimizer->zero_grad();
    model->loss(batch.data, batch.target).backward();
    optimizer->step();
    const auto trained = Time::now();
    if (save) {
      const double before = processor_seconds();
      checkpointer.step(++step);
      times.saves.push_back(since(trained));
      times.processor.push_back(processor_seconds() - before);
    }
    (save ? times.with : times.without).push_back(since(start));
  };
  for (int i = 0; i < 3; ++i) run_step(false);
  const double own_before = resident("RssAnon"), shared_before = resident("RssShmem");
  for (int i = 0; i < 3; ++i) run_step(true);
  const double own_after = resident("RssAnon"), shared_after = resident("RssShmem");
  const std::string saved = hash(state_dict(*model)) + hash(state_dict(*optimizer));
  run_step(false);
  if (!checkpointer.resume() || hash(state_dict(*model)) + hash(state_dict(*optimizer)) != saved)
    throw Error("what was resumed is not what was saved");
  run_step(false);
  times = {};
  const double state = state_mebibytes(*model, *optimizer);
  Floor floor(static_cast<int64_t>(state * (1 << 20)) / context.world_size());
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool save : {round % 2 == 0, round % 2 != 0})
      for (int i = 0; i < options.steps; ++i) run_step(save);
    floor.copy(context.group());
    run_step(false);  // the caches hold what they hold after a step
    times.without.pop_back();
  }
  nlohmann::ordered_json figures = {{"model", options.model},
                                    {"optimizer", options.sharded ? "shared" : "libtorch"},
                                    {"ranks", context.world_size()},
                                    {"state_mebibytes", state}};
  times.add_to(figures);
  figures["own_memory_mebibytes"] = own_after - own_before;
  figures["shared_memory_mebibytes"] = shared_after - shared_before;
  floor.add_to(figures);
  if (context.is_main()) print(figures);
  return context.is_main() ? figures.dump(2) : "";
}

}  // namespace lockstep::bench
