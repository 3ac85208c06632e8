// A rank of `lockstep tour`: fits a small network to a curve, with the collectives for C, without LibTorch. It saves
// its state, resumes it on any number of ranks, and leaves when asked.

#include <lockstep/c.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "base/environment.h"
#include "observe/metrics_file.h"
#include "rank_page/rank_board.h"

namespace {

constexpr int kHidden = 16, kSamples = 512, kSteps = 900, kSaveEvery = 25, kPrintEvery = 75;
constexpr double kRate = 0.1;
constexpr int kPreempted = 60;
/// A step is made to take this long, so that there is time to watch.
constexpr std::chrono::milliseconds kStep(12);
using Weights = std::array<double, 3 * kHidden + 1>;

struct State {
  int64_t step = 0;
  Weights weights{};
};

void check(lockstep_status status) {
  if (status == LOCKSTEP_OK) return;
  std::fprintf(stderr, "%s: %s\n", lockstep_status_name(status), lockstep_last_error());
  std::exit(1);
}

State first_state() {
  State state;
  for (int h = 0; h < kHidden; ++h) {
    state.weights[h] = 6.0 * h / kHidden - 3;            // how fast a unit rises
    state.weights[kHidden + h] = 3 - 6.0 * h / kHidden;  // and where
    state.weights[2 * kHidden + h] = 0.1 * (h % 3 - 1);
  }
  return state;
}

/// The state in the file, or the initial one; rank 0's on all ranks.
State resume(lockstep_group* world, const std::string& path) {
  State state = first_state();
  if (lockstep_rank(world) == 0 && std::filesystem::exists(path)) {
    const std::string bytes = lockstep::read_file(path);
    if (bytes.size() == sizeof state) std::memcpy(&state, bytes.data(), sizeof state);
  }
  check(lockstep_broadcast(world, &state.step, 1, LOCKSTEP_INT64, 0, nullptr));
  check(lockstep_broadcast(world, state.weights.data(), static_cast<int64_t>(state.weights.size()), LOCKSTEP_FLOAT64, 0,
                           nullptr));
  if (state.step > 0) lockstep::own_page().note_checkpoint(path, state.step, lockstep::Clock::now());
  return state;
}

void save(const State& state, const std::string& path) {
  lockstep::AtomicFile file(path);
  file.write(&state, sizeof state);
  file.commit();
  lockstep::own_page().note_checkpoint(path, state.step, lockstep::Clock::now());
}

/// The gradient and, as its last element, the loss.
using Sum = std::array<double, 3 * kHidden + 2>;

/// Adds the gradients of every `stride`-th sample.
Sum share_of_gradient(const Weights& w, int first, int stride) {
  Sum sum{};
  for (int sample = first; sample < kSamples; sample += stride) {
    const double x = 4.0 * sample / kSamples - 2, target = std::sin(2 * x) + 0.3 * x;
    std::array<double, kHidden> units{};
    double y = w[3 * kHidden];
    for (int h = 0; h < kHidden; ++h) {
      units[h] = std::tanh(w[h] * x + w[kHidden + h]);
      y += w[2 * kHidden + h] * units[h];
    }
    const double error = (y - target) / kSamples;
    for (int h = 0; h < kHidden; ++h) {
      const double inner = error * w[2 * kHidden + h] * (1 - units[h] * units[h]);
      sum[h] += inner * x;
      sum[kHidden + h] += inner;
      sum[2 * kHidden + h] += error * units[h];
    }
    sum[3 * kHidden] += error;
    sum[3 * kHidden + 1] += (y - target) * (y - target) / kSamples;
  }
  return sum;
}

/// The number of parts of a step, independent of the number of ranks: `lockstep run --virtual-ranks V`, else one for
/// each rank.
int number_of_parts(int size) {
  const auto given = lockstep::Environment::from_process().lockstep_virtual_ranks;
  return given ? std::clamp(std::atoi(given->c_str()), size, kSamples) : size;
}

/// The sum over all samples. All ranks add the parts in the same order, so the bits do not depend on their number: to a
/// part that one rank has computed, the others have added zeros.
class SumOverRanks {
 public:
  explicit SumOverRanks(lockstep_group* world)
      : world_(world), rank_(lockstep_rank(world)), size_(lockstep_size(world)), parts_(number_of_parts(size_)) {}

  /// This rank's parts; returns the number of samples in them.
  int64_t compute(const Weights& weights) {
    int64_t samples = 0;
    for (int part = rank_; part < count(); part += size_) {
      parts_[part] = share_of_gradient(weights, part, count());
      samples += (kSamples - part + count() - 1) / count();
    }
    return samples;
  }

  Sum reduce() {
    std::vector<Sum> all(parts_.size());
    check(lockstep_all_reduce(world_, parts_.data(), all.data(), static_cast<int64_t>(parts_.size() * Sum().size()),
                              LOCKSTEP_FLOAT64, LOCKSTEP_SUM, nullptr));
    Sum sum{};
    for (const Sum& part : all)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    return sum;
  }

 private:
  int count() const { return static_cast<int>(parts_.size()); }

  lockstep_group* world_;
  const int rank_, size_;
  std::vector<Sum> parts_;  ///< zeros for another rank's parts
};

/// Steps until the end, or until the run is to stop; returns the exit code.
int train(lockstep_group* world, State state, const std::string& path, lockstep::MetricsFile& metrics) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  SumOverRanks over_ranks(world);
  auto since = lockstep::Clock::now();
  lockstep::StepsTaken taken;
  while (state.step < kSteps) {
    const auto start = lockstep::Clock::now();
    const int64_t samples = over_ranks.compute(state.weights);
    std::this_thread::sleep_until(start + kStep);
    const auto computed = lockstep::Clock::now();
    const Sum sum = over_ranks.reduce();
    taken.communication_s += lockstep::seconds_since(computed);
    ++taken.steps;
    taken.samples += samples;
    for (size_t i = 0; i < state.weights.size(); ++i) state.weights[i] -= kRate * sum[i];
    ++state.step;
    lockstep::own_page().count_step();
    const double loss = sum.back();
    if (rank == 0) metrics.scalar({.step = state.step}, "train/loss", loss);
    if (state.step % kPrintEvery == 0) {
      taken.seconds = lockstep::seconds_since(since);
      metrics.steps({.step = state.step}, taken);
      taken = {};
      since = lockstep::Clock::now();
      if (rank == 0)
        std::printf("  step %3ld of %d on %d ranks, loss %.4f\n", static_cast<long>(state.step), kSteps, size, loss);
      std::fflush(stdout);
    }
    int stop = 0;
    check(lockstep_stop_requested(world, &stop));
    if (rank == 0 && (stop != 0 || state.step % kSaveEvery == 0)) save(state, path);
    if (stop != 0) return kPreempted;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    const std::string folder = lockstep::Environment::from_process().lockstep_run_dir.value_or(".");
    lockstep_group* world = nullptr;
    check(lockstep_join(nullptr, &world));
    const std::string path = folder + "/tour.state";
    const State state = resume(world, path);
    int code = 0;
    {
      const int rank = lockstep_rank(world);
      lockstep::MetricsFile metrics(folder + "/metrics_rank" + std::to_string(rank) + ".jsonl",
                                    std::chrono::milliseconds(200));
      metrics.run({.rank = rank,
                   .world_size = lockstep_size(world),
                   .local_rank = rank,
                   .backend = "shm",
                   .libtorch_version = "not used",
                   .first_step = state.step},
                  lockstep::system_facts());
      code = train(world, state, path, metrics);
    }
    check(lockstep_leave(world));
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
