#pragma once

#include <optional>
#include <vector>

#include "launch/diagnosis/stall.h"
#include "launch/diagnosis/verdict.h"

namespace lockstep {

/// A rank ended well without having joined, and another waits for it to come.
struct Absence {
  int rank = 0;
  int witness = 0;
};

/// The first such rank. A program that has no need of the others (`true`, a script, Python) is none as long as nobody
/// waits, nor is a rank whose process has started another that still lives: that one may join in its place.
std::optional<Absence> find_absence(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks);

/// Whether a rank that runs may still come to wait for one that has ended so.
bool may_be_absent(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks);

/// Whether a rank with this page has not joined, nor failed to, and so others may wait for it to come.
bool is_unjoined(const RankAccount& account);

}  // namespace lockstep
