#include "hosts/round_hub.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace lockstep::hosts {
namespace {

using hub::put;

constexpr std::chrono::seconds kHelloTime(3);
constexpr size_t kMostStrangers = 64;

/// In a time that does not depend on where they differ.
bool same_key(std::string_view one, std::string_view other) {
  unsigned different = one.size() == other.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(one.size(), other.size()); ++i)
    different |= static_cast<unsigned>(static_cast<unsigned char>(one[i]) ^ static_cast<unsigned char>(other[i]));
  return different == 0;
}

std::string text_of(const std::set<int>& islands) {
  std::string text;
  for (const int island : islands) text += (text.empty() ? "" : ", ") + std::to_string(island);
  return text;
}

}  // namespace

RoundHub::RoundHub(const std::vector<std::string>& addresses, Options options) : options_(std::move(options)) {
  for (const std::string& address : addresses) listeners_.push_back(listen_on(address, 0));
}

std::string RoundHub::endpoints() const {
  std::string text;
  for (const Listener& one : listeners_) text += (text.empty() ? "" : ",") + one.endpoint.text();
  return text;
}

void RoundHub::watch(PollSet& polled) {
  for (const Listener& listener : listeners_)
    polled.add(listener.socket.get(), POLLIN, [this, fd = listener.socket.get()](const pollfd&) { accept_from(fd); });
  for (Member& member : members_) {
    const bool has_output = member.written < member.out.size();
    polled.add(member.socket.get(), static_cast<short>(POLLIN | (has_output ? POLLOUT : 0)),
               [this, &member](const pollfd& ready) {
                 if ((ready.revents & POLLOUT) != 0) write(member);
                 if ((ready.revents & ~POLLOUT) != 0) read(member);
               });
  }
}

void RoundHub::accept_from(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const auto strangers = std::count_if(members_.begin(), members_.end(),
                                       [](const Member& one) { return one.standing == Standing::kStranger; });
  if (!socket || static_cast<size_t>(strangers) >= kMostStrangers) return;
  members_.emplace_back().socket = std::move(socket);
}

void RoundHub::read(Member& member) {
  std::array<char, 1 << 16> piece;
  for (int i = 0; i < 64 && member.end.empty(); ++i) {
    const ssize_t count = ::recv(member.socket.get(), piece.data(), piece.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (count <= 0) {
      member.end = "its connection ended";
      return;
    }
    member.heard = Clock::now();
    member.in.append(piece.data(), static_cast<size_t>(count));
    if (member.standing == Standing::kStranger && member.in.size() > hub::kMostHelloBytes) member.end = "no hello";
  }
  size_t at = 0;
  while (member.end.empty() && member.in.size() - at >= hub::kHeadBytes) {
    std::string_view rest = std::string_view(member.in).substr(at);
    const auto size = hub::take<uint32_t>(rest);
    const auto kind = hub::take<hub::Kind>(rest);
    if (size > hub::kMostBytes) member.end = "its message is too long";
    if (rest.size() < size) break;
    handle(member, kind, rest.substr(0, size));
    at += hub::kHeadBytes + size;
  }
  member.in.erase(0, at);
}

void RoundHub::write(Member& member) {
  while (member.written < member.out.size()) {
    const ssize_t count = ::send(member.socket.get(), member.out.data() + member.written,
                                 member.out.size() - member.written, MSG_NOSIGNAL);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count < 0) {
      member.end = "its connection ended";
      return;
    }
    member.written += static_cast<size_t>(count);
  }
  member.out.clear();
  member.written = 0;
}

void RoundHub::send(Member& member, const std::string& frame) {
  member.out += frame;
  write(member);
}

void RoundHub::handle(Member& member, hub::Kind kind, std::string_view body) {
  if (member.standing == Standing::kStranger && kind != hub::Kind::kHello) {
    member.end = "no hello";
    return;
  }
  switch (kind) {
    case hub::Kind::kHello:
      return welcome(member, body);
    case hub::Kind::kContribute:
      return receive(member, body);
    case hub::Kind::kState:
      return hand_out(member, body);
    case hub::Kind::kLeave:
      finished_.insert(member.island);
      member.end = "it has finished";
      return;
    default:
      return;  // kBeat: it was heard
  }
}

void RoundHub::receive(Member& member, std::string_view body) {
  // One that is late, for a round that has closed, keeps what it has learned for the next.
  if (hub::take<int64_t>(body) != round_ + 1 || member.standing != Standing::kIn || member.contributed) return;
  member.takes_part = hub::take<uint8_t>(body) != 0;
  const auto outer = hub::take<uint64_t>(body);
  if (!first_contributed_) {
    first_contributed_ = Clock::now();
    outer_ = outer;
  }
  if (outer != *outer_) {
    member.end = "its outer copy differs from the others'; it gets theirs";
    return;
  }
  member.contributed = true;
  member.bytes = body;
}

void RoundHub::welcome(Member& member, std::string_view body) {
  const std::string_view key = body.substr(0, std::min(body.size(), hub::kKeyDigits));
  body.remove_prefix(key.size());
  const auto island = hub::take<int32_t>(body);
  if (member.standing != Standing::kStranger || !same_key(key, options_.key) || island < 0 ||
      island >= options_.islands) {
    member.end = "no hello";
    return;
  }
  member.round = hub::take<int64_t>(body);
  const auto model = hub::take<uint64_t>(body);
  if (!model_) model_ = model;
  if (*model_ != model) {
    send(member, hub::frame(hub::Kind::kRefused, "machine " + std::to_string(island) +
                                                " has another model, other ranks, or other options of the DiLoCo than "
                                                "the machine that came first; give all machines the same"));
    options_.tell("machine " + std::to_string(island) + " is refused: its model or its DiLoCo's options differ");
    member.end = "it was refused";
    return;
  }
  for (Member& other : members_)
    if (&other != &member && other.island == island) other.end = "it has connected again";
  member.island = island;
  member.standing = Standing::kWaiting;
  finished_.erase(island);
  came_.insert(island);
  if (!first_waits_) first_waits_ = Clock::now();
}

/// The giver's state has come: all that wait for one get it, and the results since.
void RoundHub::hand_out(Member& from, std::string_view body) {
  if (from.island != giver_) return;
  giver_ = -1;
  const std::string_view whole = body;
  const auto round = hub::take<int64_t>(body);
  if (starts_) {
    round_ = round;
    from.standing = Standing::kIn;
    expected_ = {from.island};
  }
  std::string take;
  put(take, round);
  put(take, static_cast<uint8_t>(starts_ ? 1 : 0));
  take += whole.substr(sizeof round);
  for (Member& member : members_) {
    if (member.standing != Standing::kWaiting) continue;
    send(member, hub::frame(hub::Kind::kTake, take));
    for (const auto& [number, result] : since_)
      if (number > round) send(member, result);
    member.standing = Standing::kIn;
    if (starts_) expected_.insert(member.island);
    options_.tell("machine " + std::to_string(member.island) + " has the outer state of machine " +
                  std::to_string(from.island) + " after round " + std::to_string(round));
  }
  starts_ = false;
  since_.clear();
  first_waits_.reset();
}

RoundHub::Member* RoundHub::first_in(Standing standing) {
  Member* first = nullptr;
  for (Member& member : members_)
    if (member.standing == standing && member.end.empty() && (first == nullptr || member.island < first->island))
      first = &member;
  return first;
}

void RoundHub::drop_the_lost() {
  const auto now = Clock::now();
  for (Member& member : members_) {
    const bool stranger = member.standing == Standing::kStranger;
    if (member.end.empty() && now - member.heard > (stranger ? Clock::duration(kHelloTime) : Clock::duration(kSilence)))
      member.end = "it was silent for " + std::to_string(kSilence.count()) + " ms";
    if (member.end.empty() || stranger) continue;
    // What it has contributed to the open round goes with it.
    if (member.island == giver_) {
      giver_ = -1;
      starts_ = false;
      since_.clear();
    }
    if (!finished_.contains(member.island))
      options_.tell("machine " + std::to_string(member.island) + " is gone: " + member.end);
  }
  members_.remove_if([](const Member& one) { return !one.end.empty(); });
}

void RoundHub::start_if_all_wait() {
  if (giver_ >= 0 || first_in(Standing::kIn) != nullptr) return;
  int waiting = 0;
  Member* giver = nullptr;
  for (Member& member : members_) {
    if (member.standing != Standing::kWaiting) continue;
    ++waiting;
    const auto place = [](const Member& one) { return std::pair(-one.round, one.island); };
    if (giver == nullptr || place(member) < place(*giver)) giver = &member;
  }
  std::set<int> absent = finished_;
  absent.insert(gone_.begin(), gone_.end());
  const int all = options_.islands - static_cast<int>(absent.size());
  const int least = std::min(options_.least, std::max(1, all));
  const bool patient = first_waits_ && Clock::now() - *first_waits_ < options_.patience;
  if (giver == nullptr || waiting < (patient ? all : least)) return;
  giver->standing = Standing::kGiving;
  giver_ = giver->island;
  starts_ = true;
  first_contributed_.reset();
  send(*giver, hub::frame(hub::Kind::kGive));
}

void RoundHub::close_if_due() {
  int contributed = static_cast<int>(finished_.size());
  bool awaited = false, any_expected = false, all = true;
  for (const Member& member : members_) {
    if (member.standing != Standing::kIn) continue;
    contributed += member.contributed ? 1 : 0;
    all = all && member.contributed;
    if (!expected_.contains(member.island)) continue;
    any_expected = true;
    awaited = awaited || !member.contributed;
  }
  if (!first_contributed_ || contributed < options_.least) return;
  const bool late = options_.deadline && Clock::now() - *first_contributed_ > *options_.deadline;
  if (late || (any_expected ? !awaited : all)) close();
}

void RoundHub::close() {
  ++round_;
  std::set<int> took_part, contributed;
  std::string entries;
  size_t bytes = 0;
  // In the order of their numbers, in which all machines add them up.
  for (int island = 0; island < options_.islands; ++island)
    for (const Member& member : members_) {
      if (member.island != island || !member.contributed) continue;
      contributed.insert(island);
      if (!member.takes_part) continue;
      took_part.insert(island);
      put(entries, static_cast<int32_t>(island));
      put(entries, static_cast<uint64_t>(member.bytes.size()));
      entries += member.bytes;
      bytes += member.bytes.size();
    }
  if (giver_ < 0 && first_in(Standing::kWaiting) != nullptr)
    for (const Member& member : members_)
      if (member.standing == Standing::kIn && took_part.contains(member.island))
        if (giver_ < 0 || member.island < giver_) giver_ = member.island, since_.clear();
  std::string body;
  put(body, round_);
  put(body, static_cast<int32_t>(giver_));
  put(body, static_cast<int32_t>(took_part.size()));
  const std::string result = hub::frame(hub::Kind::kResult, body + entries);
  if (giver_ >= 0) since_.emplace_back(round_, result);
  for (Member& member : members_) {
    if (member.standing == Standing::kIn) send(member, result);
    member.contributed = false;
    member.bytes.clear();
  }
  expected_ = contributed;
  const auto waited = Clock::now() - *std::exchange(first_contributed_, std::nullopt);
  options_.record("{\"round\": " + std::to_string(round_) + ", \"outer_before\": " + std::to_string(*outer_) + ", \"took_part\": [" + text_of(took_part) +
                  "], \"bytes\": " + std::to_string(bytes) + ", \"seconds_open\": " +
                  std::to_string(std::chrono::duration<double>(waited).count()) + "}");
  tell_changes(took_part);
}

void RoundHub::tell_changes(const std::set<int>& took_part) {
  if (took_part == std::exchange(told_, took_part)) return;
  options_.tell("round " + std::to_string(round_) + ": machines " + text_of(took_part) + " of " +
                std::to_string(options_.islands) + " take part");
}

void RoundHub::tick() {
  drop_the_lost();
  start_if_all_wait();
  close_if_due();
}

}  // namespace lockstep::hosts
