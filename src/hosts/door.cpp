#include "hosts/door.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

namespace lockstep::hosts {
namespace {

constexpr int kAcceptedInATurn = 64;
/// Connections accepted, and handshakes continued, in one turn while no agent is awaited: the ranks' messages wait for
/// the turn's end, and a handshake takes up to a millisecond. Each accepted connection may need two before it has
/// proved the key.
constexpr int kStrangersInATurn = 4, kServedInATurn = 2;
/// After such a turn strangers are ignored for this many times its duration.
constexpr int kRest = 9;

/// Adds the time of a block to `spent`.
class Timed {
 public:
  explicit Timed(Clock::duration& spent) : spent_(spent) {}
  ~Timed() { spent_ += Clock::now() - start_; }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Clock::duration& spent_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace

void Door::open(const std::vector<std::string>& addresses, int port) {
  for (const std::string& address : addresses) listeners_.push_back(listen_on(address, port));
}

void Door::close() {
  listeners_.clear();
  waiting_.clear();
}

std::vector<Endpoint> Door::endpoints() const {
  std::vector<Endpoint> endpoints;
  for (const Listener& listener : listeners_) endpoints.push_back(listener.endpoint);
  return endpoints;
}

void Door::watch(PollSet& polled) {
  served_ = 0;
  if (const auto spent = std::exchange(spent_, {}); spent.count() > 0) resting_until_ = Clock::now() + kRest * spent;
  if (is_resting()) return;
  for (const Listener& listener : listeners_)
    polled.add(listener.socket.get(), POLLIN, [this, fd = listener.socket.get()](const pollfd&) { accept_from(fd); });
  for (Waiting& one : waiting_) {
    const int fd = one.channel ? one.channel->fd() : one.socket.get();
    const short events = one.channel ? one.channel->events() : static_cast<short>(POLLIN);
    polled.add(fd, events, [this, &one](const pollfd&) { serve(one); });
  }
}

void Door::accept_from(int listener) {
  const Timed timed(spent_);
  const int most = expected_ > 0 ? kAcceptedInATurn : kStrangersInATurn;
  for (int i = 0; i < most; ++i) {
    sockaddr_storage from{};
    socklen_t length = sizeof from;
    FileDescriptor socket(
        ::accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    std::array<char, NI_MAXHOST> text{};
    getnameinfo(reinterpret_cast<sockaddr*>(&from), length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    waiting_.push_back({std::move(socket), nullptr, Clock::now(), text.data()});
  }
}

void Door::serve(Waiting& one) {
  if (one.over) return;
  if (expected_ == 0 && ++served_ > kServedInATurn) return;  // it is still ready in the next turn
  const Timed timed(spent_);
  if (!one.channel) one.channel = std::make_unique<Channel>(std::move(one.socket), tls_);
  one.channel->act();
  if (one.channel->state() == Channel::State::kHandshake) return;
  if (!one.channel->is_open()) return turn_away(one);
  one.over = true;
  admitted_.push_back(std::move(one.channel));
}

void Door::turn_away(Waiting& one) {
  one.over = true;
  ++turned_away_;
  last_stranger_ = one.from;
}

std::optional<Clock::time_point> Door::due() const {
  std::optional<Clock::time_point> at;
  if (!waiting_.empty()) at = waiting_.front().since + kHandshakeTime;
  if (is_resting()) at = at ? std::min(*at, resting_until_) : resting_until_;
  return at;
}

void Door::tick(Clock::time_point now) {
  std::erase_if(waiting_, [](const Waiting& one) { return one.over; });
  const size_t most = kMostWaiting + expected_;
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    const bool too_many = waiting_.size() > most;
    if (!too_many && now - one->since < kHandshakeTime) break;
    turn_away(*one);
    one = waiting_.erase(one);
  }
}

}  // namespace lockstep::hosts
