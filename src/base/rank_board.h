#pragma once

#include <optional>

#include "base/rank_page.h"
#include "base/shared_segment.h"

namespace lockstep {

/// One page for each rank of a launcher, in one piece of memory that the launcher and its ranks map. It has no name;
/// ranks inherit its descriptor, whose number stands in their environment.
class RankBoard {
 public:
  /// The launcher's. Throws Error.
  explicit RankBoard(int world_size);
  /// A rank's, of the inherited descriptor; empty if that is no board of `world_size` ranks.
  static std::optional<RankBoard> open(int fd, int world_size);

  RankPage& page(int rank) const {
    return *reinterpret_cast<RankPage*>(segment_.data() + static_cast<size_t>(rank) * RankPage::kBytes);
  }
  int world_size() const { return static_cast<int>(segment_.size() / RankPage::kBytes); }
  int fd() const { return segment_.fd(); }

 private:
  explicit RankBoard(SharedSegment segment) : segment_(std::move(segment)) {}
  SharedSegment segment_;
};

/// The board that this process's launcher gave it; null without one, and in a process that a rank forked.
const RankBoard* launchers_board();

/// This process's own page: on its launcher's board, else one that nobody reads. The first call opens the board.
RankPage& own_page();

/// The rank whose page is written by the process `pid`; -1 if none is.
int rank_of_process(pid_t pid);

}  // namespace lockstep
