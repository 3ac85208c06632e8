#pragma once

#include <cstddef>

namespace lockstep::bench {

struct TriadRates {
  double plain_gb_per_s = 0;
  /// With stores that go past the cache, as STREAM's are where compilers make them so.
  double streaming_gb_per_s = 0;
};

/// a[i] = b[i] + s * c[i] on `processes` processes at once, each on three arrays of `bytes`. As STREAM counts: 24 bytes
/// for an item of 8, and from the first process's start to the last one's end. The best of `repeats`.
TriadRates measure_triad(int processes, size_t bytes, int repeats);

}  // namespace lockstep::bench
