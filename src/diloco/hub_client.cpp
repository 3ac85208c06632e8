#include "diloco/hub_client.h"

#include <sys/socket.h>

#include <chrono>
#include <cstdio>

#include <lockstep/error.h>

#include "base/island_variables.h"
#include "base/library_thread.h"
#include "base/socket.h"

namespace lockstep::diloco {
namespace {

using hub::Kind;

/// For an agent that has lost the hub for a while.
constexpr std::chrono::seconds kReachAgent(15);
/// The agent takes what is sent as fast as the network does, and closes the connection when it is over.
constexpr std::chrono::hours kAnyTime(24);

}  // namespace

std::optional<HubPlace> HubPlace::of_environment() {
  const std::optional<std::string> where = IslandVariables::from_process().lockstep_island;
  if (!where) return {};
  HubPlace place;
  int read = 0;
  if (std::sscanf(where->c_str(), "%d/%d@%n", &place.island, &place.islands, &read) != 2 || read == 0 ||
      place.island < 0 || place.island >= place.islands || where->size() == static_cast<size_t>(read))
    throw Error("LOCKSTEP_ISLAND is \"" + *where +
                "\", which `lockstep run --islands` does not set; unset it, or start the program with --islands");
  place.agent = where->substr(static_cast<size_t>(read));
  return place;
}

void HubClient::connect() {
  disconnect();
  const Deadline deadline(kReachAgent);
  while (!socket_) {
    try {
      socket_ = connect_unix(place_.agent);
    } catch (const std::exception& error) {
      if (deadline.passed())
        throw Error("DiLoCo: the agent of this machine, which `lockstep run --islands` has started, is gone (" +
                    std::string(error.what()) + "); start the run again");
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  lost_ = false;
  received_.clear();
  receiver_ = library_thread([this] { receive(); });
}

void HubClient::disconnect() {
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  for (std::thread* thread : {&receiver_, &giver_})
    if (thread->joinable()) thread->join();
  socket_.reset();
}

bool HubClient::send(std::string_view frame) {
  const std::lock_guard lock(sending_);
  try {
    send_all(socket_.get(), frame.data(), frame.size(), Deadline(kAnyTime));
    return true;
  } catch (const std::exception&) {
    return false;  // the receiver finds the end as well
  }
}

void HubClient::receive() {
  try {
    for (;;) {
      char head[hub::kHeadBytes];
      receive_all(socket_.get(), head, sizeof head, Deadline(kAnyTime));
      std::string_view rest(head, sizeof head);
      const auto size = hub::take<uint32_t>(rest);
      Message message{hub::take<Kind>(rest), std::string(size, '\0')};
      receive_all(socket_.get(), message.body.data(), size, Deadline(kAnyTime));
      const std::lock_guard lock(mutex_);
      received_.push_back(std::move(message));
      came_.notify_all();
    }
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    came_.notify_all();
  }
}

std::optional<HubClient::Message> HubClient::next() {
  std::unique_lock lock(mutex_);
  came_.wait(lock, [&] { return lost_ || !received_.empty(); });
  if (received_.empty()) return {};
  Message message = std::move(received_.front());
  received_.pop_front();
  if (message.kind == Kind::kRefused) throw Error("DiLoCo: " + message.body);
  return message;
}

HubClient::Message HubClient::join(int64_t round, uint64_t model) {
  std::string body;
  hub::put(body, round);
  hub::put(body, model);
  for (;;) {
    connect();
    send(hub::frame(Kind::kJoin, body));
    // The agent may have lost the hub: then it closes the connection, and takes the next one when it has found it, or
    // says that the run is over, and ends.
    if (std::optional<Message> message = next()) return std::move(*message);
  }
}

void HubClient::give(const std::string& body) {
  if (giver_.joinable()) giver_.join();
  giver_ = library_thread([this, frame = hub::frame(Kind::kState, body)] { send(frame); });
}

std::deque<std::string> HubClient::results() {
  std::deque<std::string> results;
  const std::lock_guard lock(mutex_);
  while (!received_.empty() && received_.front().kind == Kind::kResult) {
    results.push_back(std::move(received_.front().body));
    received_.pop_front();
  }
  return results;
}

bool HubClient::is_lost() {
  const std::lock_guard lock(mutex_);
  return lost_ && received_.empty();
}

std::deque<std::string> HubClient::contribute(const std::string& body) {
  std::deque<std::string> missed = results();
  if (!missed.empty()) return missed;
  if (is_lost() || !send(hub::frame(Kind::kContribute, body))) return {};
  if (std::optional<Message> message = next()) missed.push_back(std::move(message->body));
  return missed;
}

void HubClient::leave() {
  if (socket_) send(hub::frame(Kind::kLeave));
  disconnect();
}

}  // namespace lockstep::diloco
