#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// What a rank has loaded, which may be another version than it was compiled against, and than the launcher's.
struct Versions {
  std::string machine;  ///< as machine_name() has it
  std::string lockstep, libtorch;

  static Versions loaded_here();
};

/// Throws Error, naming both sides, if a rank has other versions than rank 0. Ranks that call it with the same
/// `versions`, by rank, all throw or none does. `leave` is called before that: a rank that serves the others stays
/// until they know. It does not throw.
void require_same_versions(const std::vector<Versions>& versions, const std::function<void()>& leave);

}  // namespace lockstep
