#pragma once

#include <atomic>
#include <optional>

#include "base/shared_segment.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// The memory before the pages.
struct BoardHead {
  static constexpr uint64_t kMagic = 0x3564726f616f'4b4c;

  uint64_t magic = kMagic;
  std::atomic<uint32_t> stopping{0};  ///< the launcher is ending the run: SIGTERM ends a rank like any program
  // Of StopAgreement.
  std::atomic<uint32_t> stop_asked{0};
  std::atomic<uint64_t> stop_at{0};
  std::atomic<uint32_t> resize_to{0};         ///< the number of ranks that `lockstep resize` asks for; 0: none
  std::atomic<uint32_t> several_machines{0};  ///< the run has ranks whose pages are on other boards
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

/// One page for each rank of a launcher, in one piece of memory that the launcher and its ranks map. It has no name:
/// ranks inherit its descriptor, whose number is in their environment.
class RankBoard {
 public:
  /// The launcher's. Throws Error.
  explicit RankBoard(int world_size);
  /// A rank's, from the inherited descriptor; empty if that is not a board of `world_size` ranks.
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

/// The board of this process's launcher; null without a launcher, and in a process that a rank forked.
const RankBoard* launchers_board();

/// The result of own_page(), for its fast path; null before the first call.
extern std::atomic<RankPage*> found_own_page;
RankPage& find_own_page();

/// This process's own page: on its launcher's board, or one without readers. The first call opens the board. Inline,
/// because each operation calls it several times.
inline RankPage& own_page() {
  RankPage* const page = found_own_page.load(std::memory_order_acquire);  // from find_own_page()
  return page != nullptr ? *page : find_own_page();
}

/// The rank whose page process `pid` writes; -1 if none.
int rank_of_process(pid_t pid);

}  // namespace lockstep
