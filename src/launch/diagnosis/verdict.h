#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/diagnosis/evidence.h"

namespace lockstep {

/// The result of a start's ranks.
struct Verdict {
  int exit_code = 0;
  std::optional<RankEnd> culprit;
  /// The culprit's failure, as it follows "rank 1 ": "failed first: exit code 3". Empty without a culprit.
  std::string headline;
  /// Other ranks that ended in the culprit's wake-up and may have failed first.
  std::vector<int> also_suspect;
  /// False: the culprit, or a rank that may be it, has not ended yet, and its end may change this verdict.
  bool settled = true;
  /// If the culprit is not the rank that ended first: the rank whose page led to it, and that rank's statement.
  std::optional<int> witness;
  std::string testimony;
  /// The rank whose calls do not match the culprit's, if the witness names one.
  std::optional<int> opponent;
};

/// Determines the culprit (blame.h), the exit code and the wording. A pure function of the evidence, and the only one
/// that chooses an exit code for ranks that have run. While ranks run it judges by the evidence so far; on complete
/// evidence the result is the verdict.
Verdict judge(const Evidence& evidence);

}  // namespace lockstep
