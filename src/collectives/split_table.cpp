#include "collectives/split_table.h"

#include "base/text.h"
#include "rank_page/rank_board.h"

namespace lockstep {

void SplitTable::check() const {
  constexpr int64_t kShown = 4;
  int64_t found = 0;
  std::string text;
  for (size_t from = 0; from < size_; ++from)
    for (size_t to = 0; to < size_; ++to) {
      const uint64_t sent = numbers_[from * numbers_in_row() + to];
      const uint64_t expected = numbers_[to * numbers_in_row() + size_ + from];
      if (sent == expected || ++found > kShown) continue;
      text += "rank " + std::to_string(from) + " sends " + counted(static_cast<int64_t>(sent), "element", "elements") +
              " to rank " + std::to_string(to) + ", which expects " + std::to_string(expected) + "; ";
    }
  if (found == 0) return;
  if (found > kShown) text += "so do " + counted(found - kShown, "other pair", "other pairs") + " of ranks; ";
  text = "all_to_all: " + text + "nothing was moved";
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw RanksDiffer(text);
}

}  // namespace lockstep
