#pragma once

#include <cstdint>
#include <string>

#include <lockstep/group.h>

namespace lockstep {

/// Failures of communication hooks, reported through the group's store. A collective cannot report them: if one rank's
/// hook has not started the collectives of the others' hooks, their next collectives do not match.
class HookProblems {
 public:
  /// `object` is the number of the reducer on its group.
  HookProblems(const Group& group, int object) : group_(group), object_(object) {}

  /// Sets whether buckets use hooks; if not, no rank checks for problems.
  void expect(bool any_hook) { any_hook_ = any_hook; }
  void post(uint64_t reduction, const std::string& problem) const;
  /// Returns the problems that all ranks have posted in this reduction, one line per rank.
  std::string of_all_ranks(uint64_t reduction) const;

 private:
  std::string key(uint64_t reduction, int rank) const;

  const Group group_;
  const int object_;
  bool any_hook_ = false;
};

}  // namespace lockstep
