// How fast is the shared-memory core's all_reduce? Ranks are forked processes; buffers lie in resident or private
// memory. Results are verified before they are timed. Rounds are interleaved over all sizes, so that drift of a shared
// machine hits them alike; the bound is 2 * ranks * bytes moved at the bandwidth a triad reaches in the same rounds.

#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/clock.h"
#include "collectives/shm/board.h"
#include "collectives/shm/protocol/communicator.h"
#include "collectives/shm/segment/bootstrap.h"

using namespace lockstep;
using namespace lockstep::shm;

namespace {

constexpr size_t kSumsFrom = 4096;
constexpr auto kTimeout = std::chrono::seconds(60);

struct Settings {
  int ranks = 2;
  size_t min_bytes = 4;
  size_t max_bytes = size_t{256} << 20;
  int rounds = 15;
  double seconds_per_cell = 0.004;
  size_t triad_bytes = size_t{64} << 20;
  bool bfloat16 = false;
};

struct Cell {
  size_t bytes;
  bool resident;
  std::vector<double> seconds;
  std::vector<double> alone;  ///< the sums of one rank's slice of resident buffers
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double minimum(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

class Rank {
 public:
  Rank(Communicator& group, const Settings& settings) : group_(group), settings_(settings) {
    resident_ = group.allocate(std::max(settings.max_bytes, size_t{128} << 10));
    private_.resize(std::max(settings.max_bytes, size_t{128} << 10) / 4);
    a_.assign(settings.triad_bytes / 4, 1);
    b_.assign(settings.triad_bytes / 4, 1);
  }

  void all_reduce(size_t bytes, bool resident) {
    void* buffer = resident ? static_cast<void*>(resident_) : private_.data();
    const auto type = settings_.bfloat16 ? DataType::kBFloat16 : DataType::kFloat32;
    group_.run({.kind = OperationKind::kAllReduce,
                .type = type,
                .count = bytes / element_bytes(type),
                .input = buffer,
                .output = buffer},
               kTimeout);
  }

  /// Small whole numbers, whose sums are exact in both types.
  bool verify(size_t bytes, bool resident) {
    const size_t count = bytes / (settings_.bfloat16 ? 2 : 4);
    const auto value = [](int rank, size_t i) { return static_cast<float>((i + static_cast<size_t>(rank)) % 5); };
    auto* buffer = resident ? resident_ : reinterpret_cast<std::byte*>(private_.data());
    for (size_t i = 0; i < count; ++i) write(buffer, i, value(group_.rank(), i));
    all_reduce(bytes, resident);
    bool good = true;
    for (size_t i = 0; i < count && good; ++i) {
      float sum = 0;
      for (int r = 0; r < group_.size(); ++r) sum += value(r, i);
      good = read(buffer, i) == sum;
    }
    std::fill(buffer, buffer + bytes, std::byte{0});  // sums of zeros stay zeros
    barrier();
    return good;
  }

  void barrier() { group_.run({.kind = OperationKind::kBarrier}, kTimeout); }

  double time(size_t bytes, bool resident, int repetitions) {
    all_reduce(bytes, resident);
    barrier();
    const auto start = Clock::now();
    for (int i = 0; i < repetitions; ++i) all_reduce(bytes, resident);
    return seconds_since(start) / repetitions;
  }

  /// What this rank sums in an all_reduce of resident buffers, without the other ranks and from its own caches.
  double sums_alone(size_t bytes, int repetitions) {
    const auto type = settings_.bfloat16 ? DataType::kBFloat16 : DataType::kFloat32;
    const auto ranks = static_cast<size_t>(group_.size());
    const size_t count = bytes / element_bytes(type) / ranks;
    std::vector<void*> buffers;
    for (size_t r = 0; r < ranks; ++r)
      buffers.push_back(reinterpret_cast<std::byte*>(private_.data()) + r * count * element_bytes(type));
    const ReduceFunction reduce = find_reduce(type, ReduceOp::kSum, group_.size());
    const Reduction sums{buffers.data(), group_.size(), buffers.data(), group_.size(), count, nullptr};
    reduce(sums);
    barrier();
    const auto start = Clock::now();
    for (int i = 0; i < repetitions; ++i) reduce(sums);
    return seconds_since(start) / repetitions;
  }

  /// Bytes a second of all ranks together: a += s * b reads two arrays and writes one.
  double triad() {
    barrier();
    const auto start = Clock::now();
    for (size_t i = 0; i < a_.size(); ++i) a_[i] += 0.5f * b_[i];
    barrier();
    return 3.0 * static_cast<double>(settings_.triad_bytes) * group_.size() / seconds_since(start);
  }

  /// Bytes a second at which this rank reads what its neighbour has just written and still has in its cache: no
  /// all_reduce of private buffers takes in its bytes faster.
  double core_to_core() {
    constexpr size_t kBytes = size_t{128} << 10;
    const int neighbour = (group_.rank() + 1) % group_.size();
    auto* mine = private_.data();
    std::vector<double> seconds;
    for (int i = 0; i < 50; ++i) {
      std::memcpy(group_.world().resident(group_.rank()), mine, kBytes);
      barrier();
      const auto start = Clock::now();
      std::memcpy(mine, group_.world().resident(neighbour), kBytes);
      seconds.push_back(seconds_since(start));
      barrier();
    }
    return static_cast<double>(kBytes) / median(seconds);
  }

 private:
  void write(std::byte* buffer, size_t i, float value) const {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    if (settings_.bfloat16)
      std::memcpy(buffer + 2 * i, &upper, 2);
    else
      std::memcpy(buffer + 4 * i, &value, 4);
  }
  float read(const std::byte* buffer, size_t i) const {
    uint32_t bits = 0;
    uint16_t upper = 0;
    std::memcpy(settings_.bfloat16 ? static_cast<void*>(&upper) : &bits, buffer + (settings_.bfloat16 ? 2 : 4) * i,
                settings_.bfloat16 ? 2 : 4);
    if (settings_.bfloat16) bits = static_cast<uint32_t>(upper) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  Communicator& group_;
  const Settings& settings_;
  std::byte* resident_;
  std::vector<float> private_, a_, b_;
};

void print(const std::vector<Cell>& cells, const std::vector<double>& triads, double core_to_core,
           const Settings& settings) {
  const double bandwidth = median(triads);
  std::printf("%d ranks, %s, kernels %s; triad %.1f GB/s (best %.1f), core to core %.1f GB/s\n", settings.ranks,
              settings.bfloat16 ? "bfloat16" : "float32", name(best_instruction_set()), bandwidth * 1e-9,
              *std::max_element(triads.begin(), triads.end()) * 1e-9, core_to_core * 1e-9);
  std::printf("%12s %10s %12s %12s %12s %10s %14s\n", "bytes", "memory", "median us", "min us", "sums alone", "GB/s",
              "of 2N bound");
  for (const Cell& cell : cells) {
    const double traffic = 2.0 * settings.ranks * static_cast<double>(cell.bytes), time = median(cell.seconds);
    std::printf("%12zu %10s %12.2f %12.2f", cell.bytes, cell.resident ? "resident" : "private", time * 1e6,
                minimum(cell.seconds) * 1e6);
    cell.alone.empty() ? std::printf(" %12s", "") : std::printf(" %12.2f", median(cell.alone) * 1e6);
    std::printf(" %10.1f", traffic / time * 1e-9);
    // Below the caches' size the bound says nothing.
    if (cell.bytes >= size_t{16} << 20) std::printf(" %13.0f%%", 100 * traffic / time / bandwidth);
    std::printf("\n");
  }
}

int run_rank(int rank, const Settings& settings, Board& board) {
  int round = 0;
  Communicator group(
      bootstrap(rank, settings.ranks, [&](const std::string& mine) { return board.all_gather(rank, round, mine); }));
  Rank self(group, settings);
  std::vector<Cell> cells;
  for (size_t bytes = settings.min_bytes; bytes <= settings.max_bytes; bytes *= 4)
    for (bool resident : {true, false}) cells.push_back({bytes, resident, {}});
  // The size of a usual bucket.
  if (settings.max_bytes >= size_t{25} << 20)
    for (bool resident : {true, false}) cells.push_back({size_t{25} << 20, resident, {}});
  std::sort(cells.begin(), cells.end(), [](const Cell& x, const Cell& y) { return x.bytes < y.bytes; });
  for (const Cell& cell : cells)
    if (!self.verify(cell.bytes, cell.resident)) {
      std::fprintf(stderr, "rank %d: wrong result for %zu bytes\n", rank, cell.bytes);
      return 1;
    }
  std::vector<double> triads;
  for (int i = 0; i < settings.rounds; ++i) {
    triads.push_back(self.triad());
    for (Cell& cell : cells) {
      // A guess every rank makes alike.
      const double guess = 1e-6 + static_cast<double>(cell.bytes) * settings.ranks * 5e-11;
      const int repetitions = std::clamp(static_cast<int>(settings.seconds_per_cell / guess), 1, 2000);
      cell.seconds.push_back(self.time(cell.bytes, cell.resident, repetitions));
      if (cell.resident && cell.bytes >= kSumsFrom) cell.alone.push_back(self.sums_alone(cell.bytes, repetitions));
    }
  }
  const double core_to_core = self.core_to_core();
  triads.erase(triads.begin());  // the first touches the pages
  if (rank == 0) print(cells, triads, core_to_core, settings);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bool tiny = false;
  CLI::App app("all_reduce of the shared-memory core");
  app.add_option("--ranks", settings.ranks, "processes");
  app.add_option("--min", settings.min_bytes, "smallest buffer");
  app.add_option("--max", settings.max_bytes, "largest buffer");
  app.add_option("--rounds", settings.rounds, "interleaved rounds")->check(CLI::Range(2, 1000));
  app.add_flag("--bfloat16", settings.bfloat16, "bfloat16 instead of float32");
  app.add_flag("--tiny", tiny, "a few sizes once, to see that it works");
  CLI11_PARSE(app, argc, argv);
  if (tiny) {
    settings.max_bytes = size_t{1} << 20;
    settings.rounds = 2;
    settings.seconds_per_cell = 1e-5;
    settings.triad_bytes = size_t{1} << 20;
  }
  Board board(settings.ranks);
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 1;
      try {
        code = run_rank(rank, settings, board);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      std::fflush(nullptr);
      ::_exit(code);
    }
    children.push_back(child);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failed += status != 0;
  }
  return failed == 0 ? 0 : 1;
}
