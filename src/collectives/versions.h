#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep {

/// The library versions that a rank has loaded, which may differ from those it was compiled against and from the
/// launcher's, and its platform.
struct Versions {
  std::string machine;  ///< from machine_name()
  std::string lockstep, libtorch;
  std::string processor;  ///< from processor_name()

  static Versions loaded_here();
};

/// Text form, for exchange between ranks.
std::ostream& operator<<(std::ostream& text, const Versions& versions);
std::istream& operator>>(std::istream& text, Versions& versions);

/// Throws Error, naming both sides, if a rank's versions differ from rank 0's. If ranks call it with the same
/// `versions`, by rank, either all throw or none does. `leave`, which does not throw, is called before throwing: a rank
/// that serves the others stays until they know.
void require_same_versions(const std::vector<Versions>& versions, const std::function<void()>& leave);

/// Warns once, on rank 0, if not all ranks have rank 0's kind of processor. `lockstep run` has already warned.
void warn_of_other_processors(const std::vector<Versions>& versions, int rank);

}  // namespace lockstep
