#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "diloco/machines.h"

namespace lockstep::diloco {

/// A machine's statement about itself when it sends a fragment.
enum class Condition : int32_t {
  kTakesPart,
  kNotFinite,  ///< it is left out
  kDiverged,   ///< its ranks have different parameters
  kFrozen,     ///< a parameter does not require grad any more
  kRefreshed,  ///< the model is attached to other tensors now
  kOutOfStep,  ///< its ranks have called step() different numbers of times
};

struct Standing {
  Condition condition = Condition::kTakesPart;
  int32_t detail = 0;  ///< kDiverged: a rank, among all; kFrozen: the place of the parameter in the model
  /// A hash that all machines have alike: of this machine's slices of the outer copy; in finish(): of its rounds.
  uint64_t outer = 0;
};

/// Whose pseudo-gradients the mean is over, or why there is none. The same on all ranks.
struct Outcome {
  std::vector<bool> took_part;  ///< by machine
  std::string error;            ///< empty: the round is good
};

/// The place of a fragment in a training: machines that are not at the same one are told.
struct Place {
  static constexpr int64_t kFinish = -1;  ///< as a fragment: the machine is in finish()
  int64_t step, fragment;
  const std::vector<std::string>* names;  ///< of the model's parameters; outlives the statements
};

/// What the machines state about themselves, before they exchange numbers and in finish(): so a machine that finishes
/// and one that begins a round learn it from each other, although nothing else of the two would fit.
class Statements {
 public:
  /// Starts to exchange them. Every rank of the rail calls it.
  Statements(const Machines& machines, Place place, Standing own);
  /// Waits for those of all machines.
  Outcome outcome(const Machines& machines);

  /// That this rank sends to other machines.
  static int64_t bytes_sent(const Machines& machines);

 private:
  Place place_;
  at::Tensor own_, all_;
  Work work_;
};

/// An outcome that ranks with a slice have, on all ranks of the machine, which call it.
Outcome shared(const Machines& machines, std::optional<Outcome> own);

/// Throws Error on all ranks if not all are in finish(), at the same place and after the same rounds, by a hash. Every
/// rank calls it.
void check_together(const Machines& machines, Place place, uint64_t rounds);

}  // namespace lockstep::diloco
