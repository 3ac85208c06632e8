#include "hosts/link_relay.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "hosts/addresses.h"
#include "hosts/link_address.h"
#include "hosts/link_plan.h"
#include "hosts/link_splice.h"
#include "hosts/tls.h"
#include "hosts/wire.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kProofTime{3000}, kLinkTime{10000}, kLocalTime{2000};
/// Connections that have not proved the key. A new one replaces the one that has taken longest.
constexpr size_t kMostUnproved = 64;
constexpr size_t kMostOrder = 256 << 10;

/// The first bytes of a link.
struct Opening {
  char magic[4] = {'L', 'S', 'L', '2'};
  uint32_t start = 0;  ///< LinkPlan::start, in network byte order, as all numbers
  uint16_t from_machine = 0;
  uint16_t from_port = 0;  ///< the connecting rank's
  uint16_t to_port = 0;
  uint16_t unused = 0;
};
constexpr char kWelcome = 'W', kNobody = 'N';

in_addr_t own_order(uint32_t address) { return htonl(address); }

sockaddr_in socket_address(uint32_t address, uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  result.sin_addr.s_addr = own_order(address);
  return result;
}

void set_on(int socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket, level, option, &on, sizeof on);
}

FileDescriptor tcp_socket() { return FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

FileDescriptor accepted_from(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  // Without a free descriptor the connection stays in the queue, and poll() returns at once.
  if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS))
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return socket;
}

/// Sockets that another thread may shut down.
class OpenSockets {
 public:
  void add(int socket) {
    const MutexLock lock(mutex_);
    if (over_) ::shutdown(socket, SHUT_RDWR);
    sockets_.push_back(socket);
  }
  /// Must be called before the socket is closed.
  void remove(int socket) {
    const MutexLock lock(mutex_);
    sockets_.remove(socket);
  }
  /// Also those that are added later.
  void shut_all() {
    const MutexLock lock(mutex_);
    over_ = true;
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
  }
  /// Shuts down those that were added first, until at most `most` are left.
  void shut_down_to(size_t most) {
    const MutexLock lock(mutex_);
    for (; sockets_.size() > most; sockets_.pop_front()) ::shutdown(sockets_.front(), SHUT_RDWR);
  }

 private:
  Mutex mutex_;
  bool over_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::list<int> sockets_ LOCKSTEP_GUARDED_BY(mutex_);
};

class Registered {
 public:
  Registered(OpenSockets& all, int socket, bool is_added = false) : all_(all), socket_(socket) {
    if (!is_added) all_.add(socket);
  }
  ~Registered() { all_.remove(socket_); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  OpenSockets& all_;
  const int socket_;
};

/// The links of one start.
struct LinksOfAStart {
  LinkPlan plan;
  LinkAddresses addresses;
  OpenSockets sockets;

  explicit LinksOfAStart(const LinkPlan& from)
      : plan(from), addresses(from.first_address, static_cast<int>(from.machines.size())) {}
  const LinkPeer* peer(int machine) const {
    return machine >= 0 && machine < addresses.machines() ? &plan.machines[static_cast<size_t>(machine)] : nullptr;
  }
  std::string own_name() const { return plan.machines[static_cast<size_t>(plan.machine)].name; }
};

class Relay {
 public:
  Relay(FileDescriptor control, FileDescriptor listener, const Key& key)
      : control_(std::move(control)),
        listener_(std::move(listener)),
        accepting_(key, Side::kCoordinator),
        connecting_(key, Side::kAgent) {}

  void run();

 private:
  struct Door {
    LinkEnd end;
    FileDescriptor socket;
  };
  bool take_order();
  std::string begin(std::string_view text);
  std::string open(const std::string& text);
  void accept_stranger();
  void accept_rank(const Door& door);
  /// Returns whether there is a thread.
  template <typename Body>
  bool on_a_thread(FileDescriptor socket, Body body);
  // On threads of their own.
  void carry_out(FileDescriptor local, const LinkEnd& end, const std::shared_ptr<LinksOfAStart>& start);
  void carry_in(FileDescriptor wire);
  void carry(int local, SSL* tls, int wire, const LinkPeer& other, const LinksOfAStart& start);
  FileDescriptor connect_to_rank(const LinksOfAStart& start, const Opening& opening) const;
  std::shared_ptr<LinksOfAStart> start() const {
    const MutexLock lock(mutex_);
    return start_;
  }
  void tell(char letter, const std::string& text) const {
    const std::string message = letter + text;
    ::send(control_.get(), message.data(), message.size(), MSG_NOSIGNAL);
  }
  void note_stranger();

  const FileDescriptor control_, listener_;
  const Tls accepting_, connecting_;
  mutable Mutex mutex_;
  std::shared_ptr<LinksOfAStart> start_ LOCKSTEP_GUARDED_BY(mutex_);
  uint64_t strangers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t told_from_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  OpenSockets unproved_;
  std::list<Door> doors_;  // of the present start
};

void Relay::run() {
  for (;;) {
    std::vector<pollfd> polled{{.fd = control_.get(), .events = POLLIN, .revents = 0},
                               {.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const Door& door : doors_) polled.push_back({.fd = door.socket.get(), .events = POLLIN, .revents = 0});
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    size_t i = 2;
    for (const Door& door : doors_)
      if (polled[i++].revents != 0) accept_rank(door);
    if (polled[1].revents != 0) accept_stranger();
    if (polled[0].revents != 0 && !take_order()) break;  // it may change the doors
  }
  if (const auto last = start()) last->sockets.shut_all();
}

bool Relay::take_order() {
  std::string text(kMostOrder, '\0');
  const ssize_t count = ::recv(control_.get(), text.data(), text.size(), MSG_DONTWAIT);
  if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
  text.resize(static_cast<size_t>(count));
  std::string problem;
  try {
    problem = text[0] == kLinkBegin ? begin(std::string_view(text).substr(1)) : open(text.substr(1));
  } catch (const std::exception& error) {
    problem = error.what();
  }
  tell(kLinkAnswer, problem);
  return true;
}

std::string Relay::begin(std::string_view text) {
  auto next = std::make_shared<LinksOfAStart>(decode<LinkPlan>(text));
  if (next->peer(next->plan.machine) == nullptr) return "a plan of links without this machine";
  doors_.clear();
  std::shared_ptr<LinksOfAStart> before;
  {
    const MutexLock lock(mutex_);
    before = std::exchange(start_, std::move(next));
  }
  if (before) before->sockets.shut_all();
  return "";
}

std::string Relay::open(const std::string& text) {
  LinkEnd end;
  std::istringstream(text) >> end.machine >> end.port;
  const auto now = start();
  if (!now || now->peer(end.machine) == nullptr) return "an end of a link on a machine that the run does not have";
  if (end.machine == now->plan.machine) return "";
  for (const Door& door : doors_)
    if (door.end == end) return "";
  FileDescriptor socket = tcp_socket();
  const sockaddr_in address = socket_address(now->addresses.of(end.machine), end.port);
  set_on(socket.get(), SOL_SOCKET, SO_REUSEADDR);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0)
    return "the loopback address " + now->addresses.text_of(end.machine) + ":" + std::to_string(end.port) +
           ", which stands for " + now->peer(end.machine)->name + " here, cannot be used: " + std::strerror(errno);
  doors_.push_back({end, std::move(socket)});
  return "";
}

void Relay::accept_rank(const Door& door) {
  FileDescriptor socket = accepted_from(door.socket.get());
  if (!socket) return;
  on_a_thread(std::move(socket),
              [this, end = door.end, now = start()](FileDescriptor local) { carry_out(std::move(local), end, now); });
}

void Relay::accept_stranger() {
  FileDescriptor socket = accepted_from(listener_.get());
  if (!socket) return;
  // Before its thread runs: many may wait for their turn to run, and count.
  const int number = socket.get();
  unproved_.shut_down_to(kMostUnproved - 1);
  unproved_.add(number);
  if (!on_a_thread(std::move(socket), [this](FileDescriptor wire) { carry_in(std::move(wire)); }))
    unproved_.remove(number);
}

template <typename Body>
bool Relay::on_a_thread(FileDescriptor socket, Body body) {
  try {
    std::thread([body = std::move(body), fd = socket.get()] {
      FileDescriptor own(fd);
      try {
        body(std::move(own));
      } catch (const std::exception&) {
        // No memory for this connection, which ends; the others go on.
      }
    }).detach();
    socket.release();  // the thread's
    return true;
  } catch (const std::system_error& error) {
    tell(kLinkNews, std::string("no thread can be started for an encrypted link: ") + error.what());
    return false;
  }
}

void Relay::carry(int local, SSL* tls, int wire, const LinkPeer& other, const LinksOfAStart& start_of) {
  set_on(local, IPPROTO_TCP, TCP_NODELAY);
  set_on(wire, SOL_SOCKET, SO_KEEPALIVE);
  const std::string reason = splice(local, tls, wire, other.name);
  const auto now = start();
  if (!reason.empty() && now.get() == &start_of)
    tell(kLinkNews, "the encrypted link between " + start_of.own_name() + " and " + other.name + " broke: " + reason);
}

void Relay::carry_out(FileDescriptor local, const LinkEnd& end, const std::shared_ptr<LinksOfAStart>& now) {
  const LinkPeer& other = *now->peer(end.machine);
  const Deadline deadline(kLinkTime);
  std::string why;
  FileDescriptor wire;
  sockaddr_in from{};
  socklen_t length = sizeof from;
  ::getpeername(local.get(), reinterpret_cast<sockaddr*>(&from), &length);
  Opening opening;
  opening.start = htonl(now->plan.start);
  opening.from_machine = htons(static_cast<uint16_t>(now->plan.machine));
  opening.from_port = from.sin_port;
  opening.to_port = htons(end.port);
  while (!deadline.passed()) {
    wire = connect_to({other.address, other.port}, deadline, why);
    if (!wire) break;
    const Registered wire_open(now->sockets, wire.get()), local_open(now->sockets, local.get());
    set_on(wire.get(), IPPROTO_TCP, TCP_NODELAY);
    const Tls::Session tls = connecting_.connect(wire.get());
    SSL_set_read_ahead(tls.get(), 1);
    const Deadline handshake(kProofTime);
    if (prove_key(tls.get(), wire.get(), handshake)) {
      char answer = 0;
      if (send_all(tls.get(), wire.get(), &opening, sizeof opening, handshake) &&
          receive_all(tls.get(), wire.get(), &answer, 1, deadline) && answer == kWelcome)
        return carry(local.get(), tls.get(), wire.get(), other, *now);
      why = answer == kNobody ? "no rank there listens on port " + std::to_string(end.port) : "it does not answer";
      break;
    }
    why = "the handshake failed";  // strangers may have taken its turn
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (start() == now)
    tell(kLinkNews, "there is no encrypted link from " + now->own_name() + " to " + other.name + ": " +
                        Endpoint{other.address, other.port}.text() + ": " + why);
}

void Relay::carry_in(FileDescriptor wire) {
  Tls::Session tls;
  Opening opening;
  {
    const Registered unproved(unproved_, wire.get(), /*is_added=*/true);
    set_on(wire.get(), IPPROTO_TCP, TCP_NODELAY);
    tls = accepting_.connect(wire.get());
    SSL_set_read_ahead(tls.get(), 1);
    const Deadline handshake(kProofTime);
    if (!prove_key(tls.get(), wire.get(), handshake)) return note_stranger();
    if (!receive_all(tls.get(), wire.get(), &opening, sizeof opening, handshake)) return;
  }
  const auto now = start();
  const LinkPeer* const other = now ? now->peer(ntohs(opening.from_machine)) : nullptr;
  const Opening known;
  if (other == nullptr || std::memcmp(opening.magic, known.magic, sizeof known.magic) != 0) return;
  // A rank of an earlier start may have found the port of a rank of this one.
  if (ntohl(opening.start) != now->plan.start) return;
  const Registered wire_open(now->sockets, wire.get());
  const FileDescriptor local = connect_to_rank(*now, opening);
  const char answer = local ? kWelcome : kNobody;
  if (!send_all(tls.get(), wire.get(), &answer, 1, Deadline(kLocalTime)) || !local) return;
  const Registered local_open(now->sockets, local.get());
  carry(local.get(), tls.get(), wire.get(), *other, *now);
}

/// The rank sees the address of the other machine and the other rank's port.
FileDescriptor Relay::connect_to_rank(const LinksOfAStart& now, const Opening& opening) const {
  FileDescriptor socket = tcp_socket();
  const sockaddr_in from = socket_address(now.addresses.of(ntohs(opening.from_machine)), ntohs(opening.from_port));
  const sockaddr_in to = socket_address(now.addresses.of(now.plan.machine), ntohs(opening.to_port));
  set_on(socket.get(), SOL_SOCKET, SO_REUSEADDR);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&from), sizeof from) != 0) return {};
  const auto wait = static_cast<int>(kLocalTime.count());
  if (connect_within(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to, wait) != 0) return {};
  return socket;
}

void Relay::note_stranger() {
  const MutexLock lock(mutex_);
  if (++strangers_ < told_from_) return;
  told_from_ *= 10;
  tell(kLinkNews, std::to_string(strangers_) + (strangers_ == 1 ? " connection" : " connections") +
                      " to the port of the encrypted links did not have the run's key, and got nothing");
}

}  // namespace

void run_link_relay(FileDescriptor control, FileDescriptor listener, const Key& key) {
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) == 0) {
    descriptors.rlim_cur = descriptors.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &descriptors);
  }
  // It is not destroyed, because threads may use it until the process ends.
  (new Relay(std::move(control), std::move(listener), key))->run();
}

}  // namespace lockstep::hosts
