#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep {

/// The library versions that a rank has loaded, which may differ from those it was compiled against and from the
/// launcher's, and the platform that it runs on.
struct Versions {
  std::string machine;  ///< as machine_name() has it
  std::string lockstep, libtorch;
  std::string processor;  ///< as processor_name() has it

  static Versions loaded_here();
};

/// In words, for the other ranks.
std::ostream& operator<<(std::ostream& text, const Versions& versions);
std::istream& operator>>(std::istream& text, Versions& versions);

/// Throws Error, naming both sides, if a rank has other versions than rank 0. Ranks that call it with the same
/// `versions`, by rank, all throw or none does. `leave` is called before that: a rank that serves the others stays
/// until they know. It does not throw.
void require_same_versions(const std::vector<Versions>& versions, const std::function<void()>& leave);

/// Rank 0 warns, once, if not all ranks run on its kind of processor. `lockstep run` has said so before.
void warn_of_other_processors(const std::vector<Versions>& versions, int rank);

}  // namespace lockstep
