#pragma once

#include <atomic>
#include <optional>

#include "rank_page/rank_page.h"
#include "base/shared_segment.h"

namespace lockstep {

/// What stands in front of the pages.
struct BoardHead {
  static constexpr uint64_t kMagic = 0x3364726f616f'4b4c;

  uint64_t magic = kMagic;
  std::atomic<uint32_t> stopping{0};  ///< the launcher ends the run: SIGTERM means what it means to any program
  // Of StopAgreement.
  std::atomic<uint32_t> stop_asked{0};
  std::atomic<uint64_t> stop_at{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

/// One page for each rank of a launcher, in one piece of memory that the launcher and its ranks map. It has no name;
/// ranks inherit its descriptor, whose number stands in their environment.
class RankBoard {
 public:
  /// The launcher's. Throws Error.
  explicit RankBoard(int world_size);
  /// A rank's, of the inherited descriptor; empty if that is no board of `world_size` ranks.
  static std::optional<RankBoard> open(int fd, int world_size);

  BoardHead& head() const { return *reinterpret_cast<BoardHead*>(segment_.data()); }
  RankPage& page(int rank) const {
    return *reinterpret_cast<RankPage*>(segment_.data() + static_cast<size_t>(rank + 1) * RankPage::kBytes);
  }
  int world_size() const { return static_cast<int>(segment_.size() / RankPage::kBytes) - 1; }
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
