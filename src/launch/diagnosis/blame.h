#pragma once

#include <optional>
#include <vector>

#include "launch/diagnosis/evidence.h"

namespace lockstep {

/// The culprit for the end of the ranks, and the evidence for it. judge() draws the conclusions (verdict.h).
struct Blame {
  enum class Ground {
    kNothing,     ///< no rank is at fault
    kHang,        ///< the launcher saw it hold up the others
    kAbsence,     ///< it ended well before it joined, and others wait for it
    kOwnEnd,      ///< it failed first
    kAccusation,  ///< another rank accuses it
    kLateness,    ///< another rank has waited in vain, and cannot name the rank, or names one that has not appeared
  };
  Ground ground = Ground::kNothing;
  std::optional<RankEnd> culprit;
  int speaker = -1;  ///< the rank whose page describes the failure; the culprit for kOwnEnd
  std::vector<int> also_suspect;
  bool settled = true;
  std::optional<int> witness;
  std::optional<int> opponent;
};

/// The culprit is the first rank that failed: later ones fail because it is gone, or because they were stopped. Of
/// several in one wake-up, it is one killed by a signal, since no rank is killed by another's action.
///
/// A rank that failed first and names another as the cause is a victim. The culprit is then the rank at the end of the
/// chain of causes, even if it ended later, with code 0 or not yet. If ranks accuse each other in a cycle, or accuse a
/// peer that they cannot name and that does not appear, the order of the ends decides as above.
///
/// A pure function. The members of Blame are those of Verdict.
Blame find_culprit(const Evidence& evidence);

/// Whether the failure is the rank's own, by its page, and not a consequence of another's.
bool is_own(RankFailure failure);

}  // namespace lockstep
