#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

/// The most memory that this process has had at the moments when look() was called, in MiB: its own, and its share of
/// what it has in common with other processes, so that the sum over a machine's ranks counts everything once.
class PeakMemory {
 public:
  void look() {
    std::ifstream file("/proc/self/smaps_rollup");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with("Pss:")) most_kib_ = std::max<int64_t>(most_kib_, std::stoll(line.substr(4)));
  }
  double mib() const { return static_cast<double>(most_kib_) / 1024; }

 private:
  int64_t most_kib_ = 0;
};
