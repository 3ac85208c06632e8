#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <vector>

namespace lockstep::faultbox {

/// For how long processes that could have run had no processor: what a machine that is busy with others takes from
/// them, and no promise of ours covers. By the kernel's own count (/proc/<pid>/schedstat) of each process's first
/// thread, looked at again and again; on a machine left to them, ranks that have a core each wait for next to nothing.
class Starvation {
 public:
  /// Looks if the last look was long enough ago.
  void look(pid_t launcher, const std::vector<pid_t>& ranks, int64_t now);
  /// What the launcher and the two ranks that waited longest waited since then: a chain of events after a fault goes
  /// through no more of them.
  int64_t since(int64_t instant) const;

 private:
  struct Sample {
    int64_t at_ns, waited_ns;
  };
  using Samples = std::vector<Sample>;
  static void add(Samples& samples, pid_t pid, int64_t now);
  static int64_t growth(const Samples& samples, int64_t since);

  int64_t looked_ns_ = 0;
  Samples launcher_;
  std::map<pid_t, Samples> ranks_;
};

}  // namespace lockstep::faultbox
