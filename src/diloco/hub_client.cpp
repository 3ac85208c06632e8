#include "diloco/hub_client.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdio>

#include <lockstep/error.h>

#include "base/island_variables.h"

namespace lockstep::diloco {
namespace {

using hub::Kind;

constexpr std::chrono::milliseconds kBeatEvery(150);
constexpr std::chrono::seconds kReach(10);
/// After this many milliseconds without an answer to what was sent, the hub's machine is gone.
constexpr int kUnanswered = 4000;

FileDescriptor connect_to(const std::string& endpoint) {
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos) return {};
  std::string host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), endpoint.c_str() + colon + 1, &hints, &found) != 0) return {};
  FileDescriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = 2, .tv_usec = 0};  // of connect() as well
  const int unanswered = kUnanswered, yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  const bool connected = ::connect(socket.get(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  if (!connected) return {};
  const timeval none{};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof unanswered);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return socket;
}

bool receive_all(int fd, char* to, size_t size) {
  while (size > 0) {
    const ssize_t count = ::recv(fd, to, size, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

}  // namespace

std::optional<HubPlace> HubPlace::of_environment() {
  const auto [where, key] = IslandVariables::from_process();
  if (!where) return {};
  HubPlace place;
  int read = 0;
  if (std::sscanf(where->c_str(), "%d/%d@%n", &place.island, &place.islands, &read) != 2 || read == 0 || place.island < 0 ||
      place.island >= place.islands || !key || key->size() != hub::kKeyDigits)
    throw Error(
        "LOCKSTEP_ISLAND and LOCKSTEP_ISLAND_KEY are set by `lockstep run --islands`, and cannot be read; unset them");
  place.endpoints = where->substr(static_cast<size_t>(read));
  place.key = *key;
  return place;
}

void HubClient::connect() {
  disconnect();
  const auto until = std::chrono::steady_clock::now() + kReach;
  while (!socket_) {
    std::string list = place_.endpoints;
    while (!socket_ && !list.empty()) {
      const size_t comma = list.find(',');
      socket_ = connect_to(list.substr(0, comma));
      list = comma == std::string::npos ? "" : list.substr(comma + 1);
    }
    if (socket_) break;
    if (std::chrono::steady_clock::now() > until)
      throw Error("DiLoCo: the coordinator of the machines' rounds, at " + place_.endpoints +
                  ", cannot be reached; `lockstep run --islands` has ended, or its machine is gone");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  lost_ = ends_ = false;
  received_.clear();
}

void HubClient::disconnect() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  came_.notify_all();
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  for (std::thread* thread : {&receiver_, &beats_, &giver_})
    if (thread->joinable()) thread->join();
  socket_.reset();
}

bool HubClient::send(std::string_view frame) {
  const std::lock_guard lock(sending_);
  while (!frame.empty()) {
    const ssize_t count = ::send(socket_.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    frame.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

void HubClient::receive() {
  std::string head(hub::kHeadBytes, '\0');
  while (receive_all(socket_.get(), head.data(), head.size())) {
    std::string_view rest = head;
    const auto size = hub::take<uint32_t>(rest);
    Message message{hub::take<Kind>(rest), std::string(size, '\0')};
    if (!receive_all(socket_.get(), message.body.data(), size)) break;
    const std::lock_guard lock(mutex_);
    received_.push_back(std::move(message));
    came_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  lost_ = true;
  came_.notify_all();
}

void HubClient::beat() {
  const std::string beat = hub::frame(Kind::kBeat);
  std::unique_lock lock(mutex_);
  while (!ends_ && !lost_) {
    lock.unlock();
    send(beat);
    lock.lock();
    came_.wait_for(lock, kBeatEvery, [&] { return ends_; });
  }
}

std::optional<HubClient::Message> HubClient::next() {
  std::unique_lock lock(mutex_);
  came_.wait(lock, [&] { return lost_ || !received_.empty(); });
  if (received_.empty()) return {};
  Message message = std::move(received_.front());
  received_.pop_front();
  return message;
}

HubClient::Message HubClient::join(int64_t steps, uint64_t model) {
  std::string body = place_.key;
  hub::put(body, static_cast<int32_t>(place_.island));
  hub::put(body, steps);
  hub::put(body, model);
  for (;;) {
    connect();
    receiver_ = std::thread([this] { receive(); });
    send(hub::frame(Kind::kHello, body));
    beats_ = std::thread([this] { beat(); });
    std::optional<Message> message = next();
    if (!message) continue;  // it was silent for too long, perhaps
    if (message->kind == Kind::kRefused) throw Error("DiLoCo: " + message->body);
    return std::move(*message);
  }
}

void HubClient::give(std::string body) {
  if (giver_.joinable()) giver_.join();
  giver_ = std::thread([this, frame = hub::frame(Kind::kState, body)] { send(frame); });
}

std::deque<std::string> HubClient::contribute(const std::string& body) {
  std::deque<std::string> results;
  const auto take_all = [&] {
    const std::lock_guard lock(mutex_);
    for (Message& one : received_) results.push_back(std::move(one.body));
    received_.clear();
    return !lost_;
  };
  if (!take_all()) return {};
  if (!results.empty()) return results;
  if (!send(hub::frame(Kind::kContribute, body))) return {};
  std::optional<Message> message = next();
  if (!message) return {};
  results.push_back(std::move(message->body));
  return results;
}

void HubClient::leave() {
  if (socket_) send(hub::frame(Kind::kLeave));
  disconnect();
}

}  // namespace lockstep::diloco
