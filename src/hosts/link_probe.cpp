#include "hosts/link_probe.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/environment.h"
#include "base/error.h"
#include "base/socket.h"
#include "hosts/addresses.h"
#include "rendezvous/key_value_client.h"

namespace lockstep::hosts {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kConnectTime(2000), kTokenTime(1000), kMeetTime(30000), kSendTime(250), kAnswerTime(5000);
constexpr int kMostPings = 200;
constexpr milliseconds kPingTime(200);
constexpr size_t kBlockBytes = 256 << 10;
using Token = std::array<unsigned char, 16>;

int64_t wall_clock_ns() {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

class Probe {
 public:
  Probe(int rank, int world_size, FileDescriptor store, const std::string& address)
      : rank_(rank), world_size_(world_size), store_(std::move(store)), listener_(listen_on(address, 0)) {}
  void run();

 private:
  void meet(const std::string& place);
  void set(const std::string& key, const std::string& text) { store_.set(key, {text.begin(), text.end()}); }
  std::string get(const std::string& key) {
    const auto bytes = store_.get(key, kMeetTime);
    return {bytes.begin(), bytes.end()};
  }
  void measure(int other);
  /// The rank with the lower number calls the first of these while the other calls the second.
  FileDescriptor await_connection(const Token& token, std::string& why);
  FileDescriptor connect(int other, const Token& token, std::string& why);
  Token token_of(int from, int to);

  const int rank_, world_size_;
  KeyValueClient store_;
  const Listener listener_;
};

void Probe::meet(const std::string& place) {
  if (store_.add("arrived/" + place, 1) == world_size_) store_.set("all/" + place, {});
  store_.wait({"all/" + place}, kMeetTime);
}

/// Strangers may connect, too; the token comes through the store, which they cannot read.
Token Probe::token_of(int from, int to) {
  const std::string key = "token/" + std::to_string(from) + "/" + std::to_string(to);
  Token token{};
  if (rank_ == to) {
    if (RAND_bytes(token.data(), static_cast<int>(token.size())) != 1) throw Error("there are no random bytes");
    store_.set(key, {token.begin(), token.end()});
  } else {
    const auto bytes = store_.get(key, kMeetTime);
    std::copy_n(bytes.begin(), std::min(bytes.size(), token.size()), token.begin());
  }
  return token;
}

FileDescriptor Probe::await_connection(const Token& token, std::string& why) {
  const Deadline deadline(kConnectTime + milliseconds(500));
  while (!deadline.passed()) {
    pollfd polled{.fd = listener_.socket.get(), .events = POLLIN, .revents = 0};
    ::poll(&polled, 1, deadline.remaining_ms());
    FileDescriptor socket(::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) continue;
    try {
      Token shown{};
      receive_all(socket.get(), shown.data(), shown.size(), Deadline(kTokenTime));
      if (shown == token) return socket;
    } catch (const Error&) {
      continue;  // a stranger
    }
  }
  why = "no connection came";
  return {};
}

FileDescriptor Probe::connect(int other, const Token& token, std::string& why) {
  const Endpoint endpoint = parse_endpoint("the other rank", get("endpoint/" + std::to_string(other)));
  FileDescriptor socket = connect_to(endpoint, Deadline(kConnectTime), why);
  if (!socket) {
    why += " (" + endpoint.text() + ")";
    return socket;
  }
  try {
    send_all(socket.get(), token.data(), token.size(), Deadline(kConnectTime));
  } catch (const Error& error) {
    why = error.what();
    socket.reset();
  }
  return socket;
}

/// Measures the round-trip time, and how far the other's clock is ahead, by the quickest of several pings.
void ping(int socket, Json& found) {
  std::vector<double> round_trips;
  int64_t ahead_ns = 0;
  const Deadline deadline(kPingTime), answered_by(kAnswerTime);
  for (int i = 0; i < kMostPings && (i == 0 || !deadline.passed()); ++i) {
    const auto began = Clock::now();
    const int64_t sent = wall_clock_ns();
    send_all(socket, &sent, sizeof sent, answered_by);
    int64_t theirs = 0;
    receive_all(socket, &theirs, sizeof theirs, answered_by);
    const double took = seconds_since(began);
    if (round_trips.empty() || took < *std::min_element(round_trips.begin(), round_trips.end()))
      ahead_ns = theirs - sent - static_cast<int64_t>(took * 0.5e9);
    round_trips.push_back(took);
  }
  const int64_t enough = 0;
  send_all(socket, &enough, sizeof enough, answered_by);
  std::nth_element(round_trips.begin(), round_trips.begin() + static_cast<ptrdiff_t>(round_trips.size() / 2),
                   round_trips.end());
  found["round_trip_s"] = round_trips[round_trips.size() / 2];
  found["clock_ahead_s"] = static_cast<double>(ahead_ns) * 1e-9;
}

void answer_pings(int socket) {
  const Deadline deadline(kAnswerTime);
  for (int64_t theirs = 1; theirs != 0;) {
    receive_all(socket, &theirs, sizeof theirs, deadline);
    const int64_t own = wall_clock_ns();
    if (theirs != 0) send_all(socket, &own, sizeof own, deadline);
  }
}

/// Sends blocks, each with a first byte that says whether another follows.
void send_blocks(int socket) {
  std::string block(kBlockBytes, '\0');
  const Deadline enough(kSendTime), taken_by(kAnswerTime);
  for (bool more = true; more;) {
    more = !enough.passed();
    block[0] = more ? 1 : 0;
    send_all(socket, block.data(), block.size(), taken_by);
  }
}

/// Bytes per second, from the end of the first block on.
double receive_blocks(int socket) {
  std::string block(kBlockBytes, '\1');
  const Deadline deadline(kAnswerTime);
  std::optional<Clock::time_point> began;
  size_t blocks = 0;
  while (block[0] != 0) {
    receive_all(socket, block.data(), block.size(), deadline);
    if (began) ++blocks;
    if (!began) began = Clock::now();
  }
  return blocks == 0 ? 0 : static_cast<double>(blocks * kBlockBytes) / seconds_since(*began);
}

void Probe::measure(int other) {
  const bool lower = rank_ < other;
  const int low = std::min(rank_, other), high = std::max(rank_, other);
  const Token up = token_of(high, low), down = token_of(low, high);
  std::string why_up, why_down;
  FileDescriptor socket = lower ? await_connection(up, why_up) : connect(other, up, why_up);
  FileDescriptor back = lower ? connect(other, down, why_down) : await_connection(down, why_down);
  const std::string pair = "pair/" + std::to_string(low) + "/" + std::to_string(high);
  Json found = {{"low", low}, {"high", high}};
  // The side that could not connect knows the reason.
  if (const std::string& why = lower ? why_down : why_up; !why.empty())
    found[lower ? "low_cannot_reach_high" : "high_cannot_reach_low"] = why;
  // Both sides must agree on the connection that they use.
  set(pair + "/has/" + std::to_string(rank_), std::string(socket ? "1" : "0") + (back ? "1" : "0"));
  const std::string theirs = get(pair + "/has/" + std::to_string(other));
  if (!(socket && theirs.at(0) == '1')) socket = back && theirs.at(1) == '1' ? std::move(back) : FileDescriptor();
  if (socket) {
    const int on = 1, fd = socket.get();
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    try {
      if (lower) {
        ping(fd, found);
        send_blocks(fd);
        found["bytes_per_s_to_low"] = receive_blocks(fd);
      } else {
        answer_pings(fd);
        found["bytes_per_s_to_high"] = receive_blocks(fd);
        send_blocks(fd);
      }
    } catch (const Error& error) {
      found["broke"] = error.what();
    }
  }
  set(pair + (lower ? "/low" : "/high"), found.dump());
}

void Probe::run() {
  set("endpoint/" + std::to_string(rank_), listener_.endpoint.text());
  meet("start");
  // A tournament: in each round every machine has one partner or, if their number is odd, one machine has none.
  const int places = world_size_ + world_size_ % 2;
  for (int round = 0; round + 1 < places; ++round) {
    const int last = places - 1;
    int other = rank_ == last ? round : (2 * round - rank_ + 2 * last) % last;
    if (other == rank_) other = last;
    if (other < world_size_) measure(other);
    meet("round/" + std::to_string(round));
  }
  if (rank_ != 0) return;
  Json all = Json::array();
  for (int low = 0; low < world_size_; ++low)
    for (int high = low + 1; high < world_size_; ++high) {
      const std::string pair = "pair/" + std::to_string(low) + "/" + std::to_string(high);
      Json found = Json::parse(get(pair + "/low"));
      found.update(Json::parse(get(pair + "/high")));
      all.push_back(std::move(found));
    }
  std::cout << all.dump() << std::endl;
}

}  // namespace

int probe_links() {
  const auto environment = Environment::from_process();
  const std::string none;
  const std::string address = environment.lockstep_address.value_or(none);
  const std::string socket = environment.lockstep_store_fd.value_or(none), rank = environment.rank.value_or(none),
                    size = environment.world_size.value_or(none);
  if (address.empty() || socket.empty() || rank.empty() || size.empty())
    throw Error("this is started by `lockstep doctor --hosts`, on each machine");
  Probe(std::stoi(rank), std::stoi(size), FileDescriptor(std::stoi(socket)), address).run();
  return 0;
}

}  // namespace lockstep::hosts
