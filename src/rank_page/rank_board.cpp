#include "rank_page/rank_board.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <thread>

#include "base/environment.h"
#include "base/error.h"
#include "base/text.h"

namespace lockstep {

std::atomic<RankPage*> found_own_page{nullptr};

namespace {

/// The thread in the first call of own_page(), which must not call it again.
std::atomic<std::thread::id> opening;

size_t board_bytes(int world_size) { return static_cast<size_t>(world_size + 1) * RankPage::kBytes; }

/// The place of this process's page, found once. Never destroyed: threads may write while the process ends.
struct Place {
  std::optional<RankBoard> board;
  RankPage unread;
  std::atomic<RankPage*> page{&unread};

  Place() {
    const Environment environment = Environment::from_process();
    const int fd = number_in(environment.lockstep_page_fd), rank = number_in(environment.rank);
    const int world_size = number_in(environment.world_size);
    if (fd < 0 || rank < 0 || rank >= world_size) return;
    opening = std::this_thread::get_id();
    board = RankBoard::open(fd, world_size);
    opening = std::thread::id();
    if (!board) return;
    page = &board->page(rank);
    page.load()->begin(::getpid());
  }

  static Place& get() {
    static Place& place = *new Place;
    // A forked child is not the rank.
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
      place.page = &place.unread;
      found_own_page = &place.unread;
    });
    (void)registered;
    return place;
  }
};

}  // namespace

RankBoard::RankBoard(int world_size) : segment_("lockstep-pages", board_bytes(world_size), board_bytes(world_size)) {
  new (&head()) BoardHead;
  for (int rank = 0; rank < world_size; ++rank) new (&page(rank)) RankPage;
}

std::optional<RankBoard> RankBoard::open(int fd, int world_size) {
  // If other code has closed descriptors since, the number may refer to another file.
  struct stat status {};
  const size_t bytes = board_bytes(world_size);
  if (::fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) != bytes || ::fcntl(fd, F_GET_SEALS) < 0)
    return std::nullopt;
  try {
    // If this process may open no more descriptors, its failure must still reach the launcher: use the original.
    int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0 && errno == EMFILE) copy = fd;
    RankBoard board(SharedSegment(FileDescriptor(copy), bytes));
    if (board.head().magic != BoardHead::kMagic) return std::nullopt;
    if (copy != fd) ::close(fd);  // so that no child process inherits it
    board.segment_.close_descriptor();
    return board;
  } catch (const Error&) {
    return std::nullopt;
  }
}

const RankBoard* launchers_board() {
  Place& place = Place::get();
  return place.page.load(std::memory_order_relaxed) == &place.unread ? nullptr : &*place.board;
}

RankPage& find_own_page() {
  RankPage* const page = Place::get().page.load(std::memory_order_relaxed);
  found_own_page.store(page, std::memory_order_release);  // to own_page()
  return *page;
}

void note_error(RankFailure kind, int peer, std::string_view text) {
  if (opening.load() != std::this_thread::get_id()) own_page().note_error(kind, peer, text);
}

int rank_of_process(pid_t pid) {
  const RankBoard* board = launchers_board();
  for (int rank = 0; board != nullptr && rank < board->world_size(); ++rank)
    if (board->page(rank).pid() == pid) return rank;
  return -1;
}

}  // namespace lockstep
