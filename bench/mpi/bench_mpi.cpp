// All-reduces of a program that uses MPI: MPI_Allreduce against Lockstep's engines over the same ranks, in turns.
//
//     mpirun -n 4 build/bin/bench_mpi
//     mpirun -n 4 build/bin/bench_mpi 0.3 4 1048576     # seconds for each size and system, and sizes in bytes
//
// Rank 0 prints, for each size, every system's median in microseconds, and how many times MPI_Allreduce's that is.
// "hierarchical" takes the ranks for those of two machines: what goes from one to the other goes through MPI.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <lockstep/mpi.h>
#include <torch/torch.h>

#include "base/clock.h"

namespace lockstep::bench {
namespace {

int rank_in_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

using AllReduce = std::function<void(const torch::Tensor& data)>;

void mpi_all_reduce(const torch::Tensor& data) {
  MPI_Allreduce(MPI_IN_PLACE, data.mutable_data_ptr(), static_cast<int>(data.numel()), MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
}

/// The median of the slowest rank, in microseconds.
double median_of(const AllReduce& all_reduce, int64_t bytes, double seconds) {
  torch::Tensor data = torch::full({bytes / 4}, rank_in_world() + 1, torch::kFloat);
  all_reduce(data);
  const float sum = static_cast<float>(world_size() * (world_size() + 1)) / 2;
  if (data.min().item<float>() != sum || data.max().item<float>() != sum)
    throw std::runtime_error("the sum of " + std::to_string(bytes) + " bytes is wrong");
  data.zero_();
  const auto began = Clock::now();
  for (int i = 0; i < 3; ++i) all_reduce(data);
  double once = seconds_since(began) / 3;
  MPI_Allreduce(MPI_IN_PLACE, &once, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  std::vector<double> times(static_cast<size_t>(std::clamp(seconds / once, 5.0, 2000.0)));
  for (double& time : times) {
    const auto start = Clock::now();
    all_reduce(data);
    time = seconds_since(start) * 1e6;
  }
  std::sort(times.begin(), times.end());
  double median = times[times.size() / 2];
  MPI_Allreduce(MPI_IN_PLACE, &median, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return median;
}

struct System {
  std::string name;
  std::vector<double> medians;  ///< microseconds, for each size
};

/// Every size once, on a Context of its own.
void measure(System& system, const std::vector<int64_t>& sizes, double seconds) {
  const auto all_sizes = [&](const AllReduce& all_reduce) {
    for (const int64_t size : sizes) system.medians.push_back(median_of(all_reduce, size, seconds));
  };
  if (system.name == "MPI_Allreduce") return all_sizes(mpi_all_reduce);
  const bool two_machines = system.name == "hierarchical";
  if (two_machines) ::setenv("LOCKSTEP_MACHINE", 2 * rank_in_world() < world_size() ? "a" : "b", 1);
  const Context context = mpi_context(MPI_COMM_WORLD, {.backend = system.name, .announce = false});
  all_sizes([&](const torch::Tensor& data) { context.group().all_reduce(data); });
  if (two_machines) ::unsetenv("LOCKSTEP_MACHINE");
}

void run(int argc, char** argv) {
  const torch::NoGradGuard no_grad;
  torch::set_num_threads(1);
  const double seconds = argc > 1 ? std::stod(argv[1]) : 0.5;
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::stoll(argv[i]));
  if (sizes.empty()) sizes = {4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
  System systems[] = {{"MPI_Allreduce", {}}, {"mpi", {}}, {"hierarchical", {}}, {"shm", {}}};
  for (System& system : systems) measure(system, sizes, seconds);
  if (rank_in_world() != 0) return;
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(library, &length);
  const std::string text(library, static_cast<size_t>(length));
  std::printf("all_reduce of %d ranks, %s; us, and times MPI_Allreduce\n%12s", world_size(),
              text.substr(0, text.find_first_of(",\n")).c_str(), "bytes");
  for (const System& system : systems) std::printf("%16s", system.name.c_str());
  std::printf("\n");
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::printf("%12lld%16.1f", static_cast<long long>(sizes[i]), systems[0].medians[i]);
    for (const System& system : {systems[1], systems[2], systems[3]})
      std::printf("%10.1f %5.2f", system.medians[i], system.medians[i] / systems[0].medians[i]);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  try {
    lockstep::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_mpi: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
