#include "hosts/link_process.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "hosts/addresses.h"
#include "hosts/link_address.h"
#include "hosts/link_plan.h"
#include "hosts/link_sockets.h"
#include "hosts/link_splice.h"
#include "hosts/links_of_a_start.h"
#include "hosts/relay_client.h"
#include "hosts/relay_request.h"
#include "hosts/relay_server.h"
#include "hosts/tls.h"
#include "hosts/wire.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::milliseconds kProofTime{3000}, kLinkTime{10000}, kLocalTime{2000}, kRegisterAgain{500};
/// For a connection past a relay, if there is one. A network that drops packets answers nothing.
constexpr std::chrono::milliseconds kDirectTime{2000};
/// Longer than the silence after which a machine is lost.
constexpr std::chrono::milliseconds kSilenceTime{5000};
/// Connections that have not proved the key. A new one replaces the one that has taken longest.
constexpr size_t kMostUnproved = 64;
constexpr size_t kMostOrder = 256 << 10;

/// The first bytes of a link.
struct Opening {
  char magic[4] = {'L', 'S', 'L', '3'};
  uint32_t start = 0;  ///< LinkPlan::start, in network byte order, as all numbers
  uint16_t from_machine = 0;
  uint16_t from_port = 0;  ///< the connecting rank's
  uint16_t to_machine = 0;
  uint16_t to_port = 0;
};
/// kOther: of another machine, which has the same address in a network of its own.
constexpr char kWelcome = 'W', kNobody = 'N', kOther = 'O';

class LinkCarrier {
 public:
  LinkCarrier(FileDescriptor control, FileDescriptor listener, const Key& key)
      : control_(std::move(control)),
        listener_(std::move(listener)),
        key_(key),
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
  bool carry_in_on_a_thread(FileDescriptor socket, bool may_ask_relay);
  // On threads of their own.
  void carry_out(FileDescriptor local, const LinkEnd& end, const std::shared_ptr<LinksOfAStart>& start);
  void carry_in(FileDescriptor wire, bool may_ask_relay);
  void answer_relay(const std::shared_ptr<LinksOfAStart>& start);
  void tell_of_no_rank(const LinkEnd& end, LinksOfAStart& start) const;
  void end_unless_over(const std::string& deed, const std::shared_ptr<LinksOfAStart>& start) const;
  FileDescriptor connect_for(const LinkEnd& end, LinksOfAStart& start, const Deadline& deadline, std::string& why);
  void relay_from_now_on(int machine, LinksOfAStart& start, const std::string& why);
  void carry(int local, SSL* tls, int wire, const LinkPeer& other, const std::shared_ptr<LinksOfAStart>& start);
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
  const Key key_;
  const Tls accepting_, connecting_;
  RelayServer relay_;
  mutable Mutex mutex_;
  std::shared_ptr<LinksOfAStart> start_ LOCKSTEP_GUARDED_BY(mutex_);
  uint64_t strangers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t told_from_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  OpenSockets unproved_;
  std::list<Door> doors_;  // of the present start
};

void LinkCarrier::run() {
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

bool LinkCarrier::take_order() {
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

std::string LinkCarrier::begin(std::string_view text) {
  auto next = std::make_shared<LinksOfAStart>(decode<LinkPlan>(text));
  const LinkPlan& plan = next->plan;
  if (next->peer(plan.machine) == nullptr) return "a plan of links without this machine";
  if (plan.relay >= 0 && next->peer(plan.relay) == nullptr) return "a plan of links without its relay";
  doors_.clear();
  std::shared_ptr<LinksOfAStart> before;
  {
    const MutexLock lock(mutex_);
    before = std::exchange(start_, std::move(next));
  }
  if (before) before->sockets.shut_all();
  if (const auto now = start(); now->may_relay(now->plan.machine)) {
    FileDescriptor none;
    if (!on_a_thread(std::move(none), [this, now](FileDescriptor) { answer_relay(now); }))
      return "no thread can be started for the relay";
  }
  return "";
}

std::string LinkCarrier::open(const std::string& text) {
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

void LinkCarrier::accept_rank(const Door& door) {
  FileDescriptor socket = accepted_from(door.socket.get());
  if (!socket) return;
  on_a_thread(std::move(socket),
              [this, end = door.end, now = start()](FileDescriptor local) { carry_out(std::move(local), end, now); });
}

void LinkCarrier::accept_stranger() {
  if (FileDescriptor socket = accepted_from(listener_.get()))
    carry_in_on_a_thread(std::move(socket), /*may_ask_relay=*/true);
}

bool LinkCarrier::carry_in_on_a_thread(FileDescriptor socket, bool may_ask_relay) {
  // Before its thread runs: many may wait for their turn to run, and count.
  const int number = socket.get();
  unproved_.shut_down_to(kMostUnproved - 1);
  unproved_.add(number);
  if (on_a_thread(std::move(socket),
                  [this, may_ask_relay](FileDescriptor wire) { carry_in(std::move(wire), may_ask_relay); }))
    return true;
  unproved_.remove(number);
  return false;
}

template <typename Body>
bool LinkCarrier::on_a_thread(FileDescriptor socket, Body body) {
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

void LinkCarrier::carry(int local, SSL* tls, int wire, const LinkPeer& other,
                        const std::shared_ptr<LinksOfAStart>& now) {
  set_on(local, IPPROTO_TCP, TCP_NODELAY);
  keep_alive(wire);
  const std::string reason = splice(local, tls, wire, other.name);
  if (!reason.empty() && start() == now)
    tell(kLinkNews, "the encrypted link between " + now->own_name() + " and " + other.name + " broke: " + reason);
  ::shutdown(local, SHUT_RDWR);
  ::shutdown(wire, SHUT_RDWR);
  if (!reason.empty()) end_unless_over("keep its encrypted link to " + other.name + ": " + reason, now);
}

/// Ranks may wait for what a link does not bring: ends the start, unless it ends by itself. If the other machine is
/// lost, the coordinator notices first.
void LinkCarrier::end_unless_over(const std::string& deed, const std::shared_ptr<LinksOfAStart>& now) const {
  for (const Deadline silence(kSilenceTime); start() == now && !silence.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (start() == now) tell(kLinkFailure, deed);
}

void LinkCarrier::carry_out(FileDescriptor local, const LinkEnd& end, const std::shared_ptr<LinksOfAStart>& now) {
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
  opening.to_machine = htons(static_cast<uint16_t>(end.machine));
  opening.to_port = htons(end.port);
  while (!deadline.passed()) {
    const bool is_relayed = now->is_relayed[static_cast<size_t>(end.machine)];
    wire = connect_for(end, *now, deadline, why);
    if (!wire) break;
    const Registered wire_open(now->sockets, wire.get()), local_open(now->sockets, local.get());
    set_on(wire.get(), IPPROTO_TCP, TCP_NODELAY);
    const Tls::Session tls = connecting_.connect(wire.get());
    SSL_set_read_ahead(tls.get(), 1);
    const Deadline handshake(kProofTime);
    why = "the handshake failed";  // strangers may have taken its turn
    if (prove_key(tls.get(), wire.get(), handshake)) {
      char answer = 0;
      if (send_all(tls.get(), wire.get(), &opening, sizeof opening, handshake) &&
          receive_all(tls.get(), wire.get(), &answer, 1, deadline) && answer == kWelcome)
        return carry(local.get(), tls.get(), wire.get(), other, now);
      if (answer == kNobody) return tell_of_no_rank(end, *now);
      why = answer == kOther ? "another machine answers there" : "it does not answer";
      if (answer != kOther || !now->may_relay(end.machine)) break;
    }
    if (now->may_relay(end.machine) && !is_relayed)
      relay_from_now_on(end.machine, *now, why);
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  end_unless_over("make an encrypted link to " + other.name + ": " + Endpoint{other.address, other.port}.text() + ": " +
                      why + (now->plan.relay < 0 ? "; if another machine can reach both, give it by --relay" : ""),
                  now);
}

/// It has ended, which is told of it, or is of another start.
void LinkCarrier::tell_of_no_rank(const LinkEnd& end, LinksOfAStart& now) const {
  if (!now.told_of_no_rank.exchange(true) && start().get() == &now)
    tell(kLinkNews, "there is no encrypted link from " + now.own_name() + " to " + now.peer(end.machine)->name +
                        ": no rank there listens on port " + std::to_string(end.port));
}

FileDescriptor LinkCarrier::connect_for(const LinkEnd& end, LinksOfAStart& now, const Deadline& deadline,
                                        std::string& why) {
  const LinkPeer& other = *now.peer(end.machine);
  if (!now.may_relay(end.machine)) return connect_to({other.address, other.port}, deadline, why);
  if (!now.is_relayed[static_cast<size_t>(end.machine)]) {
    if (FileDescriptor wire = connect_to({other.address, other.port}, Deadline(kDirectTime), why)) return wire;
    relay_from_now_on(end.machine, now, why);
  }
  return connect_to_relay(now.plan, key_, {.kind = RelayRequest::kConnect, .to = static_cast<uint32_t>(end.machine)},
                          kLinkTime, why);
}

void LinkCarrier::relay_from_now_on(int machine, LinksOfAStart& now, const std::string& why) {
  if (now.is_relayed[static_cast<size_t>(machine)].exchange(true) || start().get() != &now) return;
  tell(kLinkNews, now.own_name() + " cannot connect to " + now.peer(machine)->name + " (" + why +
                      "): its data for it goes by the relay " + now.peer(now.plan.relay)->name);
}

void LinkCarrier::answer_relay(const std::shared_ptr<LinksOfAStart>& now) {
  bool is_told = false;
  while (start() == now) {
    std::string why;
    const FileDescriptor line = connect_to_relay(now->plan, key_, {.kind = RelayRequest::kRegister}, kLinkTime, why);
    if (line) {
      const Registered line_open(now->sockets, line.get());
      while (const auto token = next_token(line.get()))
        if (FileDescriptor wire =
                connect_to_relay(now->plan, key_, {.kind = RelayRequest::kBind, .token = *token}, kProofTime, why))
          carry_in_on_a_thread(std::move(wire), /*may_ask_relay=*/false);
    } else if (!is_told && start() == now) {
      is_told = true;
      tell(kLinkNews, now->own_name() + " cannot register with the relay: " + why);
    }
    std::this_thread::sleep_for(kRegisterAgain);
  }
}

void LinkCarrier::carry_in(FileDescriptor wire, bool may_ask_relay) {
  Tls::Session tls;
  Opening opening;
  std::optional<RelayRequest> request;
  {
    const Registered unproved(unproved_, wire.get(), /*is_added=*/true);
    set_on(wire.get(), IPPROTO_TCP, TCP_NODELAY);
    const Deadline handshake(kProofTime);
    if (may_ask_relay && asks_relay(wire.get(), handshake)) {
      request = hear_request(wire.get(), key_, handshake);
      if (!request) return note_stranger();
    } else {
      tls = accepting_.connect(wire.get());
      SSL_set_read_ahead(tls.get(), 1);
      if (!prove_key(tls.get(), wire.get(), handshake)) return note_stranger();
      if (!receive_all(tls.get(), wire.get(), &opening, sizeof opening, handshake)) return;
    }
  }
  if (request) return relay_.serve(std::move(wire), *request);
  const auto now = start();
  const LinkPeer* const other = now ? now->peer(ntohs(opening.from_machine)) : nullptr;
  const Opening known;
  if (other == nullptr || std::memcmp(opening.magic, known.magic, sizeof known.magic) != 0) return;
  // A rank of an earlier start may have found the port of a rank of this one.
  if (ntohl(opening.start) != now->plan.start) return;
  const Registered wire_open(now->sockets, wire.get());
  const bool is_meant = ntohs(opening.to_machine) == now->plan.machine;
  const FileDescriptor local = is_meant ? connect_to_rank(*now, opening) : FileDescriptor();
  const char answer = local ? kWelcome : is_meant ? kNobody : kOther;
  if (!send_all(tls.get(), wire.get(), &answer, 1, Deadline(kLocalTime)) || !local) return;
  const Registered local_open(now->sockets, local.get());
  carry(local.get(), tls.get(), wire.get(), *other, now);
}

/// The rank sees the address of the other machine and the other rank's port.
FileDescriptor LinkCarrier::connect_to_rank(const LinksOfAStart& now, const Opening& opening) const {
  FileDescriptor socket = tcp_socket();
  const sockaddr_in from = socket_address(now.addresses.of(ntohs(opening.from_machine)), ntohs(opening.from_port));
  const sockaddr_in to = socket_address(now.addresses.of(now.plan.machine), ntohs(opening.to_port));
  set_on(socket.get(), SOL_SOCKET, SO_REUSEADDR);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&from), sizeof from) != 0) return {};
  const auto wait = static_cast<int>(kLocalTime.count());
  if (connect_within(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to, wait) != 0) return {};
  return socket;
}

void LinkCarrier::note_stranger() {
  const MutexLock lock(mutex_);
  if (++strangers_ < told_from_) return;
  told_from_ *= 10;
  tell(kLinkNews, std::to_string(strangers_) + (strangers_ == 1 ? " connection" : " connections") +
                      " to the port of the encrypted links did not have the run's key, and got nothing");
}

}  // namespace

void run_link_carrier(FileDescriptor control, FileDescriptor listener, const Key& key) {
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) == 0) {
    descriptors.rlim_cur = descriptors.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &descriptors);
  }
  // It is not destroyed, because threads may use it until the process ends.
  (new LinkCarrier(std::move(control), std::move(listener), key))->run();
}

}  // namespace lockstep::hosts
