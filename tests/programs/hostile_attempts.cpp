// Strangers at a port of a run: hostile_attempts HOST:PORT ATTEMPTS KEY_FILE|-. It prints, by kind of attempt, how many
// connected, how many bytes they got in answer at most, and how many got in. With the run's key it also replays what a
// machine that has the key sends, and comes with the key but wrong frames.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "base/socket.h"
#include "hosts/addresses.h"
#include "hosts/channel.h"

namespace {

using namespace lockstep;         // NOLINT
using namespace lockstep::hosts;  // NOLINT

constexpr size_t kMostAtOnce = 100;

enum Attack { kGarbage, kTlsWithoutKey, kWrongKey, kHalfOpen, kSlow, kFlood, kOversized, kReplayed, kInsider, kKinds };
constexpr const char* kNames[kKinds] = {"garbage", "tls_without_key", "wrong_key", "half_open", "slow",
                                        "flood",   "oversized",       "replayed",  "insider"};

struct Counts {
  int64_t attempts = 0, connected = 0, got_in = 0, most_bytes = 0;
};
std::array<Counts, kKinds> counts;

/// All that an agent with the key says in a session with a coordinator that has it.
std::string recorded(const Key& key) {
  int agents[2], coordinators[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, agents) != 0 ||
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, coordinators) != 0)
    std::abort();
  const FileDescriptor near(agents[1]), far(coordinators[1]);
  const Tls of_agent(key, Side::kAgent), of_coordinator(key, Side::kCoordinator);
  Channel agent(FileDescriptor(agents[0]), of_agent), coordinator(FileDescriptor(coordinators[0]), of_coordinator);
  std::string said;
  std::array<char, 4096> piece;
  for (int i = 0; i < 20; ++i) {
    agent.act();
    if (i == 10) agent.send(hosts::Kind::kHello, Hello{.version = "replayed", .host = "replayed"});
    for (ssize_t n; (n = ::recv(near.get(), piece.data(), piece.size(), 0)) > 0;) {
      said.append(piece.data(), static_cast<size_t>(n));
      (void)!::send(far.get(), piece.data(), static_cast<size_t>(n), 0);
    }
    coordinator.act();
    for (ssize_t n; (n = ::recv(far.get(), piece.data(), piece.size(), 0)) > 0;)
      (void)!::send(near.get(), piece.data(), static_cast<size_t>(n), 0);
  }
  if (!agent.is_open() || !coordinator.is_open()) std::abort();
  return said;
}

struct Attackers {
  const Endpoint endpoint;
  const std::optional<Key> key;
  const Tls wrong{Key::generate(), Side::kAgent};
  const std::unique_ptr<Tls> right = key ? std::make_unique<Tls>(*key, Side::kAgent) : nullptr;
  const std::string session = recorded(key ? *key : Key::generate());
  SSL_CTX* const plain = ::SSL_CTX_new(::TLS_client_method());
  std::mt19937 random{11};
};

class Attempt {
 public:
  Attempt(Attackers& of, Attack kind) : kind_(kind) {
    ++counts[kind].attempts;
    std::string why;
    FileDescriptor socket = connect_to(of.endpoint, Deadline(std::chrono::seconds(5)), why);
    if (!socket) return;
    ++counts[kind].connected;
    switch (kind) {
      case kWrongKey:
      case kInsider:
        channel_ = std::make_unique<Channel>(std::move(socket), kind == kInsider ? *of.right : of.wrong);
        channel_->act();
        return;
      case kTlsWithoutKey: {
        ssl_.reset(::SSL_new(of.plain));
        ::SSL_set_fd(ssl_.get(), socket.get());
        ::SSL_set_connect_state(ssl_.get());
        ::SSL_do_handshake(ssl_.get());
        break;
      }
      case kGarbage:
        for (char& byte : unsent_ = std::string(1 + of.random() % 2000, '\0')) byte = static_cast<char>(of.random());
        break;
      case kOversized:  // a handshake of TLS of as many bytes as a record may tell, then one that is longer
        unsent_ = std::string("\x16\x03\x01\xff\xff\x01\xff\xff\xff", 9) + std::string(30000, 'x');
        break;
      case kSlow:
      case kReplayed:
        unsent_ = of.session;
        break;
      case kFlood: {
        const linger at_once{1, 0};
        ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        return;  // a reset
      }
      default:
        break;
    }
    socket_ = std::move(socket);
    look();
  }
  ~Attempt() {
    look();
    counts[kind_].most_bytes = std::max(counts[kind_].most_bytes, heard_);
  }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  void look() {
    if (channel_) return look_at_channel();
    if (!socket_) return;
    if (ssl_ && ::SSL_do_handshake(ssl_.get()) == 1) ++counts[kind_].got_in, ssl_.reset();
    const size_t most = kind_ == kSlow ? 1 : unsent_.size();
    if (!unsent_.empty())
      if (const ssize_t sent = ::send(socket_.get(), unsent_.data(), most, MSG_NOSIGNAL | MSG_DONTWAIT); sent > 0)
        unsent_.erase(0, static_cast<size_t>(sent));
    std::array<char, 4096> piece;
    for (ssize_t n; (n = ::recv(socket_.get(), piece.data(), piece.size(), MSG_DONTWAIT)) > 0;) heard_ += n;
  }

 private:
  void look_at_channel() {
    channel_->act();
    if (!channel_->is_open()) return;
    if (kind_ != kInsider) {
      if (!std::exchange(told_, true)) ++counts[kind_].got_in;
      return;
    }
    // More than a greeting may have, of a kind that nobody knows.
    if (!std::exchange(told_, true)) channel_->send_bytes(255, std::string(1 << 20, 'x'));
    try {
      while (channel_->next(1 << 20)) continue;
    } catch (const ProtocolError&) {
    }
  }

  struct FreeSsl {
    void operator()(SSL* ssl) const { ::SSL_free(ssl); }
  };
  const Attack kind_;
  FileDescriptor socket_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
  std::unique_ptr<Channel> channel_;
  std::string unsent_;
  int64_t heard_ = 0;
  bool told_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  ::signal(SIGPIPE, SIG_IGN);
  const int attempts = std::atoi(argv[2]);
  const bool has_key = std::string(argv[3]) != "-";
  Attackers all{.endpoint = parse_endpoint("HOST:PORT", argv[1]),
                .key = has_key ? std::optional(Key::from_file(argv[3])) : std::nullopt};
  std::deque<std::unique_ptr<Attempt>> at_once;
  for (int i = 0; i < attempts; ++i) {
    // Of those with the key a few: each costs the run a session.
    auto kind = static_cast<Attack>(all.random() % kInsider);
    if (has_key && i % 1000 == 500) kind = kInsider;
    at_once.push_back(std::make_unique<Attempt>(all, kind));
    if (i % 20 == 0)
      for (const auto& one : at_once) one->look();
    if (at_once.size() > kMostAtOnce) at_once.pop_front();
  }
  for (int i = 0; i < 20; ++i) {
    for (const auto& one : at_once) one->look();
    ::usleep(10000);
  }
  at_once.clear();
  ::SSL_CTX_free(all.plain);
  std::printf("{");
  for (int kind = 0; kind < kKinds; ++kind)
    std::printf("%s\"%s\": {\"attempts\": %ld, \"connected\": %ld, \"got_in\": %ld, \"most_bytes\": %ld}",
                kind > 0 ? ", " : "", kNames[kind], static_cast<long>(counts[kind].attempts),
                static_cast<long>(counts[kind].connected), static_cast<long>(counts[kind].got_in),
                static_cast<long>(counts[kind].most_bytes));
  std::printf("}\n");
  return 0;
}
