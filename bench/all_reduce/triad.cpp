#include "triad.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// What the processes share.
struct Shared {
  std::atomic<int> arrived{0};
  struct Span {
    Clock::time_point start, end;
  } spans[1024];
};

void meet(Shared& shared, int everybody) {
  const int mine = shared.arrived.fetch_add(1) + 1;
  const int wanted = (mine + everybody - 1) / everybody * everybody;
  while (shared.arrived.load() < wanted) sched_yield();
}

void plain(double* a, const double* b, const double* c, size_t items) {
  for (size_t i = 0; i < items; ++i) a[i] = b[i] + 3.0 * c[i];
}

void streaming(double* a, const double* b, const double* c, size_t items) {
#ifdef __SSE2__
  const __m128d factor = _mm_set1_pd(3.0);
  for (size_t i = 0; i < items; i += 2)
    _mm_stream_pd(a + i, _mm_add_pd(_mm_load_pd(b + i), _mm_mul_pd(factor, _mm_load_pd(c + i))));
  _mm_sfence();
#else
  plain(a, b, c, items);
#endif
}

double* array(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) _exit(1);
  auto* items = static_cast<double*>(memory);
  std::fill_n(items, bytes / sizeof(double), 1.0);
  return items;
}

/// Runs in a child: the two forms in turn, `repeats` times.
[[noreturn]] void work(Shared& shared, int rank, int processes, size_t bytes, int repeats) {
  double *a = array(bytes), *b = array(bytes), *c = array(bytes);
  for (int round = 0; round < 2 * repeats; ++round) {
    meet(shared, processes);
    const auto start = Clock::now();
    (round % 2 == 0 ? plain : streaming)(a, b, c, bytes / sizeof(double));
    shared.spans[rank * 2 * repeats + round] = {start, Clock::now()};
  }
  _exit(0);
}

}  // namespace

TriadRates measure_triad(int processes, size_t bytes, int repeats) {
  repeats = std::min(repeats, 512 / processes);
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  auto& shared = *new (memory) Shared;
  std::vector<pid_t> children;
  for (int rank = 0; rank < processes; ++rank) {
    const pid_t child = fork();
    if (child == 0) work(shared, rank, processes, bytes, repeats);
    children.push_back(child);
  }
  bool fine = true;
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  for (const pid_t child : children) {
    int status = 1;
    while (child > 0 && waitpid(child, &status, WNOHANG) == 0) {
      if (!fine || Clock::now() > deadline) kill(child, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fine = fine && child > 0 && status == 0;
  }
  TriadRates best;
  for (int round = 0; fine && round < 2 * repeats; ++round) {
    auto [start, end] = shared.spans[round];
    for (int rank = 1; rank < processes; ++rank) {
      const Shared::Span& span = shared.spans[rank * 2 * repeats + round];
      start = std::min(start, span.start), end = std::max(end, span.end);
    }
    const double rate =
        3.0 * static_cast<double>(bytes) * processes / std::chrono::duration<double, std::nano>(end - start).count();
    double& of = round % 2 == 0 ? best.plain_gb_per_s : best.streaming_gb_per_s;
    of = std::max(of, rate);
  }
  munmap(memory, sizeof(Shared));
  return best;
}

}  // namespace lockstep::bench
