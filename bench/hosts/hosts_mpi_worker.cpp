// A rank of bench_hosts.py under an MPI: what hosts_worker.cpp measures, in the same way. Built with the MPI's compiler
// wrapper.

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

double now() { return MPI_Wtime(); }

int measure(int rank, int size, long bytes, double seconds) {
  // Not in place: Open MPI 4.1's hierarchical module then reads a buffer at address 1.
  std::vector<float> data(static_cast<size_t>(bytes / 4), static_cast<float>(rank + 1)), total(data.size());
  const auto all_reduce = [&] {
    MPI_Allreduce(data.data(), total.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  all_reduce();
  const float sum = static_cast<float>(size * (size + 1)) / 2;
  if (std::any_of(total.begin(), total.end(), [&](float value) { return value != sum; })) {
    std::fprintf(stderr, "the sum of %ld bytes is wrong\n", bytes);
    return 1;
  }
  std::fill(data.begin(), data.end(), 0.0f);
  const double began = now();
  for (int i = 0; i < 3; ++i) all_reduce();
  double once = (now() - began) / 3;
  MPI_Allreduce(MPI_IN_PLACE, &once, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  const int rounds = std::clamp(static_cast<int>(seconds / (once / size)), 5, 2000);
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const double start = now();
    all_reduce();
    times.push_back((now() - start) * 1e6);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  std::sort(times.begin(), times.end());
  if (rank == 0) std::printf("%ld %.1f %.1f\n", bytes, times[times.size() / 2], times.front());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1, status = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int i = 2; i < argc && status == 0; ++i) status = measure(rank, size, std::atol(argv[i]), std::atof(argv[1]));
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return 0;
}
