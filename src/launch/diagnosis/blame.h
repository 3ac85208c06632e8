#pragma once

#include <optional>
#include <vector>

#include "launch/diagnosis/evidence.h"

namespace lockstep {

/// The culprit for the end of the ranks, and the evidence for it. judge() draws the conclusions (verdict.h).
struct Blame {
  enum class Ground {
    kNothing,     ///< no rank is at fault
    kHang,        ///< the launcher saw that it holds up the others
    kAbsence,     ///< it ended well before it joined, and others wait for it
    kOwnEnd,      ///< it failed first
    kAccusation,  ///< another rank says so
    kLateness,    ///< another rank has waited in vain, and cannot say for which, or names one that has not shown up
  };
  Ground ground = Ground::kNothing;
  std::optional<RankEnd> culprit;
  int speaker = -1;  ///< the rank whose page says what happened; the culprit's own for kOwnEnd
  std::vector<int> also_suspect;
  bool settled = true;
  std::optional<int> witness;
  std::optional<int> opponent;
};

/// The culprit is the first rank that failed: later ones fail because it is gone, or because they were stopped. Of
/// several in one wake-up it is one that was killed by a signal, since no rank is killed by what another does.
///
/// A rank that failed first and names another as the cause is a victim: the culprit is the rank at the end of the chain
/// of causes, whether it ended later, with code 0 or not yet. Where ranks accuse each other in a circle, or accuse a
/// peer that they cannot name and that does not show up, the order of the ends decides as above.
///
/// A pure function. Its members are those of Verdict.
Blame find_culprit(const Evidence& evidence);

/// Whether the failure is the rank's own, by its page, and no consequence of another's.
bool is_own(RankFailure failure);

}  // namespace lockstep
