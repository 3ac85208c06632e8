#include "hosts/round_hub.h"

#include <algorithm>

#include "base/text.h"

namespace lockstep::hosts {
namespace {

constexpr size_t kMostJoinBytes = (1 << 20) + 4096;  // of model and options
/// Between two ticks of a hub that runs. After longer ones its machine was stopped or busy, and messages wait.
constexpr std::chrono::milliseconds kLongTick{300};
constexpr std::chrono::seconds kTellStepsEvery(1);
constexpr int kMostFragments = 1 << 20;
/// Bytes for one machine that its link has not taken, besides those of some rounds.
constexpr size_t kMostUnsent = 256 << 20, kMostRoundsUnsent = 4;

std::string list_of(const std::set<int>& islands) {
  std::string text;
  for (const int island : islands) text += (text.empty() ? "" : ", ") + std::to_string(island);
  return text;
}

int code_of(std::string_view body) {
  try {
    return decode<Ended>(body).value;
  } catch (const ProtocolError&) {
    return -1;
  }
}

std::string name_of_machine(int island) { return "machine " + std::to_string(island); }

/// "machine 1 has `ranks 2`, and machine 0 `ranks 1`", of the first line that differs.
std::string difference(int island, std::string_view lines, int first, std::string_view known) {
  const auto take_line = [](std::string_view& rest) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string line = end == 0 ? "nothing" : "`" + printable(std::string(rest.substr(0, end))) + "`";
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return line;
  };
  while (!lines.empty() || !known.empty()) {
    const std::string own = take_line(lines), other = take_line(known);
    if (own != other) return name_of_machine(island) + " has " + own + ", and " + name_of_machine(first) + " " + other;
  }
  return "they differ after the first MiB of names";
}

/// The copies of all are the same unless a machine computes other bits.
uint64_t copy_of_most(const OpenRounds::Round& round) {
  std::map<uint64_t, int> copies;
  for (const auto& [island, one] : round.sent) ++copies[one.outer];
  return std::max_element(copies.begin(), copies.end(),
                          [](const auto& one, const auto& other) { return one.second < other.second; })
      ->first;
}

std::string digits_of(uint64_t hash) { return formatted("%016llx", static_cast<unsigned long long>(hash)); }

std::string seconds_text(Clock::duration time) { return std::to_string(std::chrono::duration<double>(time).count()); }

/// A text of ours between quotation marks.
std::string in_quotes(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

}  // namespace

void RoundHub::admit(int island, std::unique_ptr<Channel> channel, bool is_new) {
  if (is_new) {
    for (std::set<int>* const known : {&known_.finished, &known_.gone, &known_.came, &known_.refused})
      known->erase(island);
    known_.lost.erase(island);
  }
  if (const auto before = members_.find(island); before != members_.end()) {
    leave_rounds(island, before->second, "its agent has connected again");
    before->second.channel->close("its agent has connected again");
    members_.erase(before);
  }
  members_[island].channel = std::move(channel);
}

void RoundHub::watch(PollSet& polled) {
  for (auto& [island, member] : members_)
    if (member.channel->state() != Channel::State::kClosed)
      polled.add(member.channel->fd(), member.channel->events(),
                 [channel = member.channel.get()](const pollfd&) { channel->act(); });
}

void RoundHub::send_to_all(Kind kind, const Over& over) {
  for (auto& [island, member] : members_)
    kind == Kind::kOver ? member.channel->send(kind, over) : member.channel->send(kind);
}

int RoundHub::count(Standing standing) const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(),
                                        [&](const auto& one) { return one.second.standing == standing; }));
}

void RoundHub::handle(int island, Member& member, hub::Kind kind, std::string_view body) {
  switch (kind) {
    case hub::Kind::kJoin:
      member.fragments.reset();
      return join(island, member, body);
    case hub::Kind::kJoinFragments:
      member.fragments = std::clamp<int32_t>(hub::take<int32_t>(body), 1, kMostFragments);
      return join(island, member, body);
    case hub::Kind::kContribute:
      return receive(island, member, body);
    case hub::Kind::kState:
      return hand_out(island, member, body);
    case hub::Kind::kLeave:
      known_.finished.insert(island);
      return leave_rounds(island, member, "it has finished");
    case hub::Kind::kLate:
      return receive(island, member, {});
    case hub::Kind::kStep:
      for (auto& [other, waits] : members_)
        if (other != island && (open_.has_any_of(other) || waits.standing == Standing::kWaiting))
          waits.send(hub::Kind::kSteps);
      return;
    case hub::Kind::kProblem:
      if (options_.problem) options_.problem(island, printable(body));
      return;
    case hub::Kind::kGone:
      return leave_rounds(island, member, "its first rank's connection has ended");
    default:
      return;  // kAlive: it was heard
  }
}

void RoundHub::receive(int island, Member& member, std::string_view body) {
  if (member.standing != Standing::kIn) return;
  const auto round = hub::take<int64_t>(body);
  // One that is late, for a round that has closed, keeps what it has learned for the next, which waits for it.
  if (round <= round_) return static_cast<void>(expected_.insert(island));
  Contribution one;
  one.step = hub::take<int64_t>(body);
  one.takes_part = hub::take<uint8_t>(body) != 0;
  one.outer = hub::take<uint64_t>(body);
  one.bytes = body;
  open_.add(round, island, std::move(one));
}

void RoundHub::join(int island, Member& member, std::string_view body) {
  if (member.standing != Standing::kHere) leave_rounds(island, member, "its program has started again");
  member.round = hub::take<int64_t>(body);
  const auto model = hub::take<uint64_t>(body);
  if (!known_.model) known_.model = {.hash = model, .island = island, .lines = std::string(body)};
  if (known_.model->hash != model) {
    const std::string why =
        "has another model, other ranks, or other options of the DiLoCo than the machine that came first: " +
        difference(island, body, known_.model->island, known_.model->lines) + "; give all machines the same";
    if (round_ == 0) known_.mismatch = name_of_machine(island) + " " + why;
    return refuse(island, member, why);
  }
  member.standing = Standing::kWaiting;
  if (options_.problem) options_.problem(island, "");
  known_.finished.erase(island);
  known_.came.insert(island);
  known_.lost[island] = "it gets the outer state";
  if (!first_waits_) first_waits_ = Clock::now();
}

void RoundHub::refuse(int island, Member& member, const std::string& why) {
  member.standing = Standing::kHere;
  known_.lost[island] = why;
  known_.refused.insert(island);
  member.send(hub::Kind::kRefused, name_of_machine(island) + " " + why);
  options_.tell(name_of_machine(island) + " is refused: it " + why);
}

/// The giver's state has come: all that wait for one get it, and the results since.
void RoundHub::hand_out(int island, Member& from, std::string_view body) {
  largest_ = std::max(largest_, body.size());
  if (island != giver_.island) return;
  const auto round = hub::take<int64_t>(body);
  if (giver_.starts) {
    if (round < round_)
      options_.tell("no machine has the outer copy after round " + std::to_string(round_) +
                    " any more; all continue from " + name_of_machine(island) + "'s after round " +
                    std::to_string(round));
    round_ = round;
    counted_.go_back(round);
    from.standing = Standing::kIn;
    known_.lost.erase(island);
    expected_ = {island};
  }
  for (auto& [number, member] : members_) {
    if (member.standing != Standing::kWaiting) continue;
    std::string take;
    hub::put(take, round);
    hub::put(take, static_cast<uint8_t>(giver_.starts ? 1 : 0));
    for (const CountedSteps::Counted& last : counted_.last(number, member.fragments.value_or(1))) {
      hub::put(take, last.step);
      hub::put(take, last.round);
    }
    take += body;
    member.send(member.fragments ? hub::Kind::kTakeFragments : hub::Kind::kTake, take);
    for (const auto& [closed, result] : giver_.since)
      if (closed > round) member.send(hub::Kind::kResult, result);
    member.standing = Standing::kIn;
    known_.lost.erase(number);
    if (giver_.starts) expected_.insert(number);
    if (!giver_.starts)
      options_.tell(name_of_machine(number) + " has the outer state of " + name_of_machine(island) + " after round " +
                    std::to_string(round));
  }
  giver_ = {};
  first_waits_.reset();
}

void RoundHub::leave_rounds(int island, Member& member, const std::string& why) {
  const bool was_in = member.standing != Standing::kHere;
  member.standing = Standing::kHere;
  expected_.erase(island);
  open_.drop_all_of(island);
  if (island == giver_.island) giver_ = {};
  if (!was_in) return;
  known_.lost[island] = why;
  if (!known_.finished.contains(island)) options_.tell(name_of_machine(island) + " is left out: " + why);
}

void RoundHub::drop_the_lost(Clock::time_point now) {
  for (auto& [island, member] : members_) {
    if (member.channel->state() == Channel::State::kClosed)
      member.end = "its channel has ended (" + member.channel->reason() + ")";
    else if (now - member.channel->last_heard() > kLeftOutAfter)
      member.end = "it was silent for " + std::to_string(kLeftOutAfter.count()) + " ms";
    else if (member.channel->queued() > kMostUnsent + kMostRoundsUnsent * largest_)
      member.end = "its link does not take the rounds as fast as they are closed";
    if (member.end.empty()) continue;
    leave_rounds(island, member, member.end);
    member.channel->close(member.end);
  }
  std::erase_if(members_, [](const auto& one) { return !one.second.end.empty(); });
}

void RoundHub::refuse_the_late() {
  if (known_.finished.empty() || count(Standing::kIn) > 0 || giver_.island >= 0) return;
  for (auto& [island, member] : members_)
    if (member.standing == Standing::kWaiting && member.round < round_)
      refuse(island, member,
             "comes when the others have finished, and no machine is left to give the outer copy after round " +
                 std::to_string(round_) + "; the trained model is on the others");
}

void RoundHub::start_if_all_wait(Clock::time_point now) {
  if (giver_.island >= 0 || count(Standing::kIn) > 0) return;
  int waiting = 0;
  Member* first = nullptr;
  for (auto& [island, member] : members_) {
    if (member.standing != Standing::kWaiting) continue;
    ++waiting;
    if (first != nullptr && member.round <= first->round) continue;
    first = &member;
    giver_.island = island;
  }
  std::set<int> absent = known_.finished;
  absent.insert(known_.gone.begin(), known_.gone.end());
  const int all = options_.islands - static_cast<int>(absent.size());
  const int least = std::min(options_.least, std::max(1, all));
  const bool patient = first_waits_ && now - *first_waits_ < options_.patience;
  if (first == nullptr || waiting < (patient ? all : least)) {
    giver_ = {};
    return;
  }
  first->standing = Standing::kGiving;
  giver_.starts = true;
  open_.clear();
  first->send(hub::Kind::kGive);
}

bool RoundHub::close_if_due(Clock::time_point now) {
  const OpenRounds::Round& next = open_.at(round_ + 1);
  if (!next.first) return false;
  if (next.sent.empty()) {  // those who had contributed are lost
    open_.drop(round_ + 1);
    return false;
  }
  bool awaited = false, any_expected = false, all = true;
  for (const auto& [island, member] : members_) {
    if (member.standing != Standing::kIn) continue;
    const bool contributed = next.sent.contains(island);
    all = all && contributed;
    if (!expected_.contains(island)) continue;
    any_expected = true;
    awaited = awaited || !contributed;
  }
  const int present = count(Standing::kIn) + count(Standing::kWaiting) + static_cast<int>(known_.finished.size());
  if (present < options_.least) return false;
  const bool late = options_.deadline && now - *next.first > *options_.deadline;
  if (!late && (any_expected ? awaited : !all)) return false;
  close(Clock::now());
  return true;
}

void RoundHub::choose_giver(const std::set<int>& from) {
  if (giver_.island >= 0 || count(Standing::kWaiting) == 0 || from.empty()) return;
  giver_ = {.island = *from.begin()};
}

void RoundHub::close(Clock::time_point now) {
  OpenRounds::Round round = open_.take(++round_);
  const uint64_t outer = copy_of_most(round);
  std::set<int> contributed, took_part;
  std::string entries;
  for (const auto& [island, one] : round.sent) {
    Member& member = members_.at(island);
    if (one.outer != outer) {
      leave_rounds(island, member, "its outer copy differs from the others'; it gets theirs");
      member.channel->close(known_.lost[island]);
      continue;
    }
    contributed.insert(island);
    if (!one.takes_part) continue;
    took_part.insert(island);
    counted_.add(island, {round_, one.step});
    hub::put(entries, static_cast<int32_t>(island));
    hub::put(entries, static_cast<uint64_t>(one.bytes.size()));
    entries += one.bytes;
  }
  choose_giver(took_part.empty() ? contributed : took_part);
  std::string body;
  hub::put(body, round_);
  hub::put(body, static_cast<int32_t>(giver_.island));
  hub::put(body, static_cast<int32_t>(took_part.size()));
  body += entries;
  largest_ = std::max(largest_, body.size());
  if (giver_.island >= 0) giver_.since.emplace_back(round_, body);
  record(took_part, round, outer, now);
  for (auto& [island, member] : members_)
    if (member.standing == Standing::kIn) member.send(hub::Kind::kResult, body);
  expected_ = contributed;
}

void RoundHub::record(const std::set<int>& took_part, const OpenRounds::Round& round, uint64_t outer,
                      Clock::time_point now) {
  size_t bytes = 0;
  for (const int island : took_part) bytes += round.sent.at(island).bytes.size();
  std::string left_out;
  for (int island = 0; island < options_.islands; ++island) {
    if (took_part.contains(island) || (options_.is_empty && options_.is_empty(island))) continue;
    const auto member = members_.find(island);
    const auto lost = known_.lost.find(island);
    std::string why = lost != known_.lost.end() ? lost->second : "it is late";
    if (member == members_.end() && lost == known_.lost.end()) why = "it has not come";
    if (member != members_.end() && lost == known_.lost.end() &&
        (member->second.standing == Standing::kHere || member->second.standing == Standing::kWaiting))
      why = "it is on its way into the rounds";
    if (member != members_.end() && member->second.standing == Standing::kIn && round.sent.contains(island))
      why = "its parameters were not finite";
    left_out += (left_out.empty() ? "" : ", ") + in_quotes(std::to_string(island)) + ": " + in_quotes(why);
  }
  options_.record("{\"round\": " + std::to_string(round_) + ", \"took_part\": [" + list_of(took_part) +
                  "], \"left_out\": {" + left_out + "}, \"bytes\": " + std::to_string(bytes) + ", \"seconds_open\": " +
                  seconds_text(now - *round.first) + ", \"seconds_waited\": " + seconds_text(now - *round.last) +
                  ", \"outer_before\": " + in_quotes(digits_of(outer)) + "}");
  const std::string who = list_of(took_part) + "; " + left_out;
  if (who == std::exchange(told_, who)) return;
  const std::string machines = took_part.empty() ? "none" : "machines " + list_of(took_part);
  options_.tell("round " + std::to_string(round_) + ": " + machines + " of " + std::to_string(options_.islands) +
                " take part" + (left_out.empty() ? "" : "; left out: " + left_out));
}

void RoundHub::tick(Clock::time_point now) {
  if (now - last_tick_ > kLongTick)
    for (auto& [island, member] : members_) member.channel->forgive(now);
  last_tick_ = now;
  for (auto& [island, member] : members_) {
    // A machine that has not joined has nothing long to say.
    while (const auto message =
               member.channel->next(member.standing == Standing::kHere ? kMostJoinBytes : hub::kMostBytes))
      if (message->kind == Kind::kEnded && options_.ended)
        options_.ended(island, code_of(message->body));
      else
        handle(island, member, static_cast<hub::Kind>(message->kind), message->body);
    // What it sends for the round is on its way.
    if (member.channel->received() > 0 && now - told_steps_ >= kTellStepsEvery) {
      told_steps_ = now;
      handle(island, member, hub::Kind::kStep, {});
    }
    member.channel->beat(now);
  }
  drop_the_lost(now);
  refuse_the_late();
  start_if_all_wait(now);
  while (close_if_due(now)) {
  }
}

}  // namespace lockstep::hosts
