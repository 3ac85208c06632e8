#include "collectives/shm/segment/bootstrap.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/machine_name.h"
#include "base/socket.h"
#include "base/usable_cores.h"
#include "collectives/shm/segment/bootstrap_card.h"
#include "collectives/shm/segment/pass_descriptor.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {
namespace {

/// A process has 128 TiB of addresses with four-level page tables. All its groups together may take kAddressBytes, and
/// each further group takes 1/kGroupShare of the remainder. With 64 ranks the first group gets 48 GiB for each rank,
/// the hundredth 2 GiB.
constexpr size_t kAddressBytes = size_t{96} << 40;
constexpr size_t kGroupShare = 32;

/// Another rank cannot join, so this one cannot either.
[[noreturn]] void throw_failure_of(const Card& other, const std::string& text) {
  note_error(RankFailure::kPeer, other.launched_rank, text);
  throw Error(text);
}

/// The message that carries the descriptor.
struct Hello {
  uint64_t magic = 0x6c6f636b73746570;
  uint32_t rank = 0;
  uint16_t watches_process = 0;  // 1: the sender has a descriptor of the receiver's process, and needs no socket
  uint16_t gives_up = 0;         // 1: the sender cannot join
  Nonce nonce{};
};

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // a leading zero byte: no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

FileDescriptor listen_on(const std::string& name, int backlog) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno_or_limit("listening for the other ranks on this machine");
  socklen_t length;
  const sockaddr_un address = abstract_address(name, length);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(socket.get(), backlog) != 0)
    throw_errno("listening for the other ranks on this machine");
  return socket;
}

/// The peer's pid as seen from here. Throws if it belongs to another user.
pid_t check_peer(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) throw_errno("SO_PEERCRED");
  if (peer.uid != ::geteuid())
    throw Error("a process of user " + std::to_string(peer.uid) + " answered; all ranks must run as the same user");
  return peer.pid;
}

class Bootstrap {
 public:
  Bootstrap(int rank, int size, const BootstrapOptions& options)
      : rank_(rank),
        size_(size),
        options_(options),
        nonce_(random_nonce()),
        segments_(static_cast<size_t>(size)),
        watches_(static_cast<size_t>(size)) {}

  /// Makes this rank's segment and socket. The card reports a failure to the others.
  Card prepare() {
    Card card;
    card.host = host_name();
    card.layout = kLayoutVersion;
    card.world_size = size_;
    card.launched_rank = rank_of_process(::getpid());
    try {
      require_descriptors(descriptors_to_form(rank_, size_),
                          "forming a group of " + std::to_string(size_) + " ranks on one machine");
      geometry_ = geometry_for(size_);
      geometry_.resident_bytes = options_.resident_bytes ? options_.resident_bytes : default_resident_bytes();
      mine_ = std::make_shared<SharedSegment>("lockstep", geometry_.segment_bytes(), geometry_.resident_at(),
                                              geometry_.apart_bytes());
      std::byte nonce[16];
      std::copy(nonce_.begin(), nonce_.end(), nonce);
      initialize_segment(*mine_, rank_, size_, nonce);
      card.boot_id = boot_id();
      card.nonce = hex(nonce_);
      card.socket_name = "lockstep-" + hex(random_nonce());
      card.segment_bytes = geometry_.segment_bytes();
      card.cpus = allowed_cpus();
      card.quota = cgroup_cpu_quota();
      listener_ = listen_on(card.socket_name, size_);
    } catch (const std::exception& error) {
      card.error = error.what();
    }
    return card;
  }

  World join(const std::vector<Card>& cards) {
    const Deadline deadline(options_.timeout);
    if (const Card& mine = cards[static_cast<size_t>(rank_)]; !mine.error.empty())
      throw Error("rank " + std::to_string(rank_) + " on " + mine.host + ": " + mine.error);
    check(cards);
    segments_[static_cast<size_t>(rank_)] = mine_;
    // Each rank first connects to all lower ranks, which needs no answer. Then it answers the higher ranks and accepts
    // the lower ranks' answers as they arrive, so it notices at once if one of them gives up.
    for (int peer = 0; peer < rank_; ++peer) {
      FileDescriptor socket = connect(peer, cards);
      watches_[static_cast<size_t>(peer)] = PeerWatch(check_peer(socket.get()), cards[static_cast<size_t>(peer)].host);
      send_hello(socket.get(), watches_[static_cast<size_t>(peer)], deadline);
      asked_.push_back(std::move(socket));
    }
    for (int left = size_ - 1; left > 0;) left -= exchange(cards, deadline);
    return World(rank_, geometry_, std::move(segments_), std::move(watches_), ranks_fit(cards));
  }

  /// Called after join() has thrown: tells the ranks that wait for this one. If even that fails for lack of resources,
  /// they wait until their timeout.
  void give_up(const std::vector<Card>& cards) noexcept {
    const auto connected = static_cast<int>(asked_.size());
    listener_.reset();
    asked_.clear();
    watches_.clear();
    for (int peer = connected; peer < rank_ && mine_ != nullptr; ++peer) {
      try {
        const FileDescriptor socket = connect(peer, cards);
        send_hello(socket.get(), PeerWatch(), Deadline(std::chrono::seconds(1)), /*gives_up=*/true);
      } catch (const std::exception&) {
        // It has ended or given up as well.
      }
    }
  }

 private:
  size_t default_resident_bytes() const {
    size_t bytes = options_.machine_bytes
                       ? options_.machine_bytes
                       : static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    // It is only address space, but every rank maps every other's in every group.
    const auto part_of = [&](size_t all, size_t share) {
      const size_t taken = std::min(all, mapped_segment_bytes());
      return (all - taken) / share / static_cast<size_t>(size_);
    };
    bytes = std::min(bytes, part_of(kAddressBytes, kGroupShare));
    rlimit limit{};
    if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      bytes = std::min(bytes, part_of(limit.rlim_cur, 8));
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      bytes = std::min<size_t>(bytes, limit.rlim_cur / 2);
    return bytes;
  }

  void check(const std::vector<Card>& cards) const {
    for (size_t r = 0; r < cards.size(); ++r)
      if (static_cast<int>(r) != rank_ && !cards[r].error.empty())
        throw_failure_of(cards[r], "rank " + std::to_string(r) + " on " + cards[r].host + ": " + cards[r].error);
    check_one_machine(cards);
    for (size_t r = 0; r < cards.size(); ++r)
      if (cards[r].layout != kLayoutVersion || cards[r].world_size != size_)
        throw Error("rank " + std::to_string(r) + " uses another version of Lockstep or another world size");
  }

  FileDescriptor connect(int peer, const std::vector<Card>& cards) const {
    const Card& card = cards[static_cast<size_t>(peer)];
    FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) throw_errno_or_limit("connecting to rank " + std::to_string(peer));
    socklen_t length;
    const sockaddr_un address = abstract_address(card.socket_name, length);
    // The peer's backlog has room for all ranks, so this does not wait.
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      const std::string why = std::strerror(errno);
      throw ConnectionClosed(
          "rank " + std::to_string(peer) + " (host " + card.host + ") cannot be reached from rank " +
          std::to_string(rank_) + " (host " + host_name() + "): " + why +
          ". Shared memory needs all ranks on one machine and in one network namespace (container).");
    }
    return socket;
  }

  void send_hello(int socket, const PeerWatch& watch, const Deadline& deadline, bool gives_up = false) const {
    Hello hello;
    hello.rank = static_cast<uint32_t>(rank_);
    hello.gives_up = gives_up;
    hello.watches_process = watch.watches_process();
    hello.nonce = nonce_;
    send_descriptor(socket, std::as_bytes(std::span(&hello, 1)), mine_->fd(), deadline);
  }

  /// Waits until a rank connects or answers, and handles all that do. Returns the number handled.
  int exchange(const std::vector<Card>& cards, const Deadline& deadline) {
    if (deadline.passed()) throw Error("passing shared memory: " + missing(cards) + " did not answer in time");
    std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
    for (const FileDescriptor& socket : asked_) entries.push_back({socket.get(), POLLIN, 0});
    if (::poll(entries.data(), entries.size(), deadline.remaining_ms()) < 0 && errno != EINTR)
      throw_errno("waiting for the other ranks on this machine");
    int done = entries[0].revents != 0 && accept(cards, deadline) ? 1 : 0;
    for (size_t peer = 0; peer < asked_.size(); ++peer) {
      if (entries[peer + 1].fd < 0 || entries[peer + 1].revents == 0) continue;
      receive(std::move(asked_[peer]), static_cast<int>(peer), cards, deadline);
      ++done;
    }
    return done;
  }

  /// Answers one rank. False if none is waiting, or if a stranger connected, whose connection is closed.
  bool accept(const std::vector<Card>& cards, const Deadline& deadline) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      // The peer is gone again. Any other error would repeat forever, with the rank still in the queue.
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return false;
      throw_errno_or_limit("answering another rank");
    }
    int peer = -1;
    try {
      const pid_t pid = check_peer(socket.get());
      Hello hello;
      FileDescriptor memory = receive_descriptor(socket.get(), std::as_writable_bytes(std::span(&hello, 1)), deadline);
      peer = static_cast<int>(hello.rank);
      if (hello.magic != Hello{}.magic || peer <= rank_ || peer >= size_ || segments_[hello.rank] != nullptr ||
          hex(hello.nonce) != cards[hello.rank].nonce)
        return false;
      if (hello.gives_up != 0) throw ConnectionClosed("rank " + std::to_string(peer) + " cannot join");
      map(peer, std::move(memory), cards);
      PeerWatch watch(pid, cards[hello.rank].host);
      send_hello(socket.get(), watch, deadline);
      keep(std::move(watch), std::move(socket), hello);
      return true;
    } catch (const LimitError&) {
      throw;
    } catch (const Error&) {
      if (peer < 0 && !deadline.passed()) return false;
      throw;
    }
  }

  void receive(FileDescriptor socket, int peer, const std::vector<Card>& cards, const Deadline& deadline) {
    Hello hello;
    FileDescriptor memory = receive_descriptor(socket.get(), std::as_writable_bytes(std::span(&hello, 1)), deadline);
    map(peer, std::move(memory), cards);
    hello.rank = static_cast<uint32_t>(peer);
    keep(std::move(watches_[static_cast<size_t>(peer)]), std::move(socket), hello);
  }

  /// The socket is closed only if neither side needs it: the other side may watch for its hang-up.
  void keep(PeerWatch watch, FileDescriptor socket, const Hello& hello) {
    if (!watch.watches_process() || hello.watches_process == 0) watch.watch_socket(std::move(socket));
    watches_[hello.rank] = std::move(watch);
  }

  void map(int peer, FileDescriptor memory, const std::vector<Card>& cards) {
    const Card& card = cards[static_cast<size_t>(peer)];
    auto segment = std::make_shared<SharedSegment>(std::move(memory), card.segment_bytes);
    segment->close_descriptor();
    segment->populate(0, geometry_.resident_at());
    const auto* control = reinterpret_cast<const Control*>(segment->data());
    Nonce nonce;
    std::copy(std::begin(control->nonce), std::end(control->nonce), nonce.begin());
    if (hex(nonce) != card.nonce || control->rank != static_cast<uint32_t>(peer))
      throw Error("the memory that rank " + std::to_string(peer) + " passed is not its own");
    segments_[static_cast<size_t>(peer)] = std::move(segment);
  }

  std::string missing(const std::vector<Card>& cards) const {
    std::string list;
    for (int r = 0; r < size_; ++r)
      if (segments_[static_cast<size_t>(r)] == nullptr)
        list += (list.empty() ? "rank " : ", rank ") + std::to_string(r) + " (host " +
                cards[static_cast<size_t>(r)].host + ")";
    return list;
  }

  const int rank_;
  const int size_;
  const BootstrapOptions options_;
  const Nonce nonce_;
  Geometry geometry_;
  std::shared_ptr<SharedSegment> mine_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> asked_;  // to the lower ranks; empty once one has answered
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  std::vector<PeerWatch> watches_;
};

}  // namespace

Geometry geometry_for(int world_size) {
  Geometry geometry;
  geometry.world_size = world_size;
  // Committed when used: more than a core's caches, less for many ranks.
  const size_t share = (size_t{8} << 20) / static_cast<size_t>(world_size);
  geometry.channel_bytes = std::min<size_t>(share / 4096 * 4096, size_t{2} << 20);
  geometry.cell_bytes = std::min(size_t{16} << 10, geometry.channel_bytes / 16 / 4096 * 4096);
  const size_t area = (size_t{32} << 20) / static_cast<size_t>(std::max(world_size, 8));
  geometry.area_bytes = geometry.cold_bytes = std::max<size_t>(area / 4096 * 4096, size_t{1} << 20);
  if (world_size > 8) geometry.box_bytes = 3 * kCacheLine;
  return geometry;
}

size_t descriptors_to_form(int rank, int size) {
  // The segment and a listening socket; one socket to each lower rank; a process descriptor for each rank that no other
  // group of this process watches; and temporarily another rank's memory and, for a higher rank, its socket.
  const auto others = static_cast<size_t>(size - 1), lower = static_cast<size_t>(rank);
  const size_t moment = others == 0 ? 0 : lower == others ? 1 : 2;
  return 2 + lower + others - std::min(others, PeerWatch::watched_processes()) + moment;
}

namespace {

/// A store ends with the process that serves it, which may be that of the rank that returns first, and its program
/// short. Whoever is gone, or late for another reason, is told of by the group's first operation.
void leave_store_together(const World& world) {
  constexpr std::chrono::seconds kLongest{5};
  constexpr std::chrono::microseconds kBetweenLooks{100};
  world.mine().has_met.store(1, std::memory_order_release);
  const Deadline deadline(kLongest);
  for (int r = 0; r < world.size(); ++r)
    while (r != world.rank() && world.control(r).has_met.load(std::memory_order_acquire) == 0 &&
           !world.watch(r).gone() && !deadline.passed())
      std::this_thread::sleep_for(kBetweenLooks);
}

}  // namespace

World bootstrap(int rank, int size, const AllGather& all_gather, const BootstrapOptions& options) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": shared memory takes 1 to " +
                std::to_string(kMaxRanks) + " ranks");
  own_page();  // from here on the others find this process's page
  Bootstrap mine(rank, size, options);
  std::vector<Card> cards;
  for (const std::string& text : all_gather(mine.prepare().text())) cards.push_back(Card::parse(text));
  if (cards.size() != static_cast<size_t>(size)) throw Error("the exchange returned the wrong number of ranks");
  std::optional<World> world;
  Outcome outcome;
  try {
    world.emplace(mine.join(cards));
  } catch (const std::exception& failure) {
    outcome = {.error = failure.what(), .consequence = dynamic_cast<const ConnectionClosed*>(&failure) != nullptr};
    mine.give_up(cards);
  }
  // No rank starts before all have joined. If one cannot, all fail with its error.
  std::vector<Outcome> all;
  for (const std::string& text : all_gather(outcome.text())) all.push_back(Outcome::parse(text));
  if (!outcome.error.empty() && !outcome.consequence) throw Error("forming a shared-memory group: " + outcome.error);
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].error.empty() && !all[r].consequence)
      throw_failure_of(cards[r], "forming a shared-memory group: rank " + std::to_string(r) + ": " + all[r].error);
  if (!outcome.error.empty()) throw Error("forming a shared-memory group: " + outcome.error);
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].error.empty())
      throw_failure_of(cards[r], "forming a shared-memory group: rank " + std::to_string(r) + ": " + all[r].error);
  leave_store_together(*world);
  return std::move(*world);
}

}  // namespace lockstep::shm
