#include "diloco/hub_client.h"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <lockstep/error.h>

#include "base/hash.h"
#include "base/island_variables.h"
#include "base/library_thread.h"
#include "base/socket.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

namespace lockstep::diloco {
namespace {

using hub::Kind;

/// For an agent that has lost the hub for a while.
constexpr std::chrono::seconds kReachAgent(15);
/// The agent takes what is sent as fast as the network does, and closes the connection when it is over.
constexpr std::chrono::hours kAnyTime(24);
/// Between two looks whether the run was asked to stop, and from the first of these to the end of a wait: a round that
/// the other machines close meanwhile still counts.
constexpr std::chrono::milliseconds kLookEvery(200), kStillWaits(2000);
/// Of the lines that are sent; the hash is of all.
constexpr size_t kMostLines = 1 << 20;
constexpr size_t kMostProblem = 2000;
constexpr size_t kSentAtOnce = 1 << 20;
constexpr std::chrono::seconds kTellStepsEvery(1);

/// Without a launcher that asks: never.
bool run_is_asked_to_stop() {
  const RankBoard* const board = launchers_board();
  return board != nullptr && board->head().stop_asked.load() != 0;
}

/// Ends before the other ranks' wait for this one, which then hear why.
std::chrono::milliseconds longest_wait() {
  const std::chrono::milliseconds timeout = own_page().collective_timeout();
  return timeout > std::chrono::milliseconds(0) ? timeout * 9 / 10 : std::chrono::minutes(30);
}

/// The number of the last round; 0: there is none.
int64_t last_of(const std::deque<std::string>& results) {
  if (results.empty()) return 0;
  std::string_view last = results.back();
  return hub::take<int64_t>(last);
}

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
  for (std::thread* thread : {&receiver_, &poster_})
    if (thread->joinable()) thread->join();
  socket_.reset();
}

bool HubClient::send(std::string_view frame) {
  const std::lock_guard lock(sending_);
  try {
    for (; !frame.empty(); frame.remove_prefix(std::min(frame.size(), kSentAtOnce))) {
      send_all(socket_.get(), frame.data(), std::min(frame.size(), kSentAtOnce), Deadline(kAnyTime));
      own_page().beat();  // a slow link is no hang
    }
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
      if (message.kind == Kind::kSteps) {
        own_page().beat();  // what it waits for goes on
        continue;
      }
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

std::optional<HubClient::Message> HubClient::next(const char* what) {
  const WaitOnPage shown(RankPage::kNoGroup, {});
  const auto longest = longest_wait();
  const Deadline deadline(longest);
  std::optional<Deadline> asked;
  asked_to_stop_ = false;
  std::unique_lock lock(mutex_);
  while (!came_.wait_for(lock, kLookEvery, [&] { return lost_ || !received_.empty(); })) {
    if (!asked && run_is_asked_to_stop()) asked.emplace(kStillWaits);
    if (asked && asked->passed()) {
      asked_to_stop_ = true;
      return {};
    }
    if (deadline.passed())
      throw Error("DiLoCo: " + std::string(what) + " has not come within " + std::to_string(longest.count() / 1000) +
                  " s, because another machine of `lockstep run --islands` has sent nothing; `lockstep status` of the "
                  "run shows which, and --round-deadline limits the wait for it");
  }
  if (received_.empty()) return {};
  Message message = std::move(received_.front());
  received_.pop_front();
  if (message.kind == Kind::kRefused) throw Error("DiLoCo: " + message.body);
  return message;
}

HubClient::Message HubClient::join(int64_t round, const std::string& model, int64_t fragments) {
  Hash hash;
  hash.add(model);
  std::string body;
  hub::put(body, round);
  hub::put(body, hash.value());
  body += model.substr(0, kMostLines);
  std::string count;
  hub::put(count, static_cast<int32_t>(fragments));
  for (;;) {
    connect();
    send(fragments == 1 ? hub::frame(Kind::kJoin, body) : hub::frame(Kind::kJoinFragments, count + body));
    // The agent may have lost the hub: then it closes the connection, and takes the next one when it has found it, or
    // says that the run is over, and ends.
    if (std::optional<Message> message = next("the outer state")) return std::move(*message);
    if (asked_to_stop_)
      throw Error(
          "DiLoCo: the run was asked to stop while this machine waited for the outer state of another one; what it has "
          "saved before is its last checkpoint");
  }
}

void HubClient::end_posting() {
  if (poster_.joinable()) poster_.join();
}

void HubClient::post(Kind kind, const std::string& body) {
  end_posting();
  poster_ = library_thread([this, frame = hub::frame(kind, body)] { send(frame); });
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

HubClient::Sent HubClient::contribute(int64_t round, const std::string& body, std::deque<std::string>& come) {
  end_posting();
  come = results();
  if (last_of(come) >= round) {
    send(hub::frame(Kind::kLate));
    return Sent::kLate;
  }
  if (is_lost()) return Sent::kLost;
  post(Kind::kContribute, body);
  return Sent::kYes;
}

bool HubClient::results_until(int64_t round, std::deque<std::string>& come) {
  for (std::string& result : results()) come.push_back(std::move(result));
  while (last_of(come) < round) {
    std::optional<Message> message = next("the result of a round");
    // The hub takes back what is in no round yet.
    if (asked_to_stop_) disconnect();
    if (!message) return false;
    come.push_back(std::move(message->body));
  }
  return true;
}

void HubClient::leave() {
  end_posting();
  if (socket_) send(hub::frame(Kind::kLeave));
  disconnect();
}

void HubClient::note_step() {
  const auto now = std::chrono::steady_clock::now();
  if (now - step_told_ < kTellStepsEvery || is_lost()) return;
  const std::unique_lock lock(sending_, std::try_to_lock);
  if (!lock) return;  // a state is on its way, and training does not wait for it
  step_told_ = now;
  const std::string frame = hub::frame(Kind::kStep);
  try {
    send_all(socket_.get(), frame.data(), frame.size(), Deadline(kAnyTime));
  } catch (const std::exception&) {  // NOLINT: the receiver finds the end as well
  }
}

void HubClient::report(const std::string& problem) {
  if (is_lost() || !socket_) return;
  end_posting();
  send(hub::frame(Kind::kProblem, problem.substr(0, kMostProblem)));
}

}  // namespace lockstep::diloco
