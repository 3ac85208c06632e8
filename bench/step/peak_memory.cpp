#include "peak_memory.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

namespace lockstep::bench {
namespace {

int64_t held_kib() {
  std::ifstream file("/proc/self/smaps_rollup");
  int64_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("Pss_Anon:") && !line.starts_with("Pss_Shmem:")) continue;
    std::istringstream words(line);
    std::string name;
    int64_t kib = 0;
    words >> name >> kib;
    sum += kib;
  }
  return sum;
}

}  // namespace

void PeakMemory::watch() {
  using Clock = std::chrono::steady_clock;
  while (!stop_.load()) {
    const auto start = Clock::now();
    peak_kib_ = std::max(peak_kib_, held_kib());
    // A fifth of a core at most: the kernel walks all pages.
    std::this_thread::sleep_for(std::max<Clock::duration>(std::chrono::milliseconds(2), 4 * (Clock::now() - start)));
  }
}

double PeakMemory::stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  return static_cast<double>(std::max(peak_kib_, held_kib())) / 1024;
}

}  // namespace lockstep::bench
