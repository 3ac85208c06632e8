#include "collectives/groups_watch.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <set>
#include <thread>
#include <utility>

#include "base/library_thread.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{200};                                   ///< between two looks of a waiting rank
constexpr milliseconds kPatience{1000};                              ///< shorter waits are not compared
constexpr milliseconds kFirstInterval{400}, kLongestInterval{6000};  ///< between two comparisons of one wait
/// By then, an engine or the watch of batch norms, which know more about such waits, has reported them.
constexpr milliseconds kKnownElsewhere{1800}, kKnownToEngine{3000};
constexpr milliseconds kOthers{1000};  ///< for the others to read their message
constexpr milliseconds kPause{10};

/// "waiting in Pipeline::forward() for a message from rank 0 in subgroup 1 (ranks 0, 2)".
std::string place_of(const WaitedMessage::Seen& seen, const std::string& group) {
  const std::string peer = "rank " + std::to_string(std::countr_zero(seen.needs));
  const auto& [is_send, group_peer, tag, number, entry] = seen.message;
  return "waiting" + (seen.label.ends_with("()") ? " in " + seen.label : "") +
         (is_send ? " until " + peer + " receives a message" : " for a message from " + peer) +
         (tag == 0 ? "" : " with tag " + std::to_string(tag)) + " in " + group;
}

/// "in all_reduce #12 of bucket 1 of 2 in the group of all ranks", "in Pipeline::state_dict() in ...". `operation`
/// names the group's last one, which a page may cut off.
std::string place_of(const RankStatus& status, const std::string& operation, const std::string& group) {
  const RankStatus::Operation& last = status.operation;
  const std::string number = " #" + std::to_string(status.awaited.sequence), in = " in " + group;
  if (last.group_id != status.awaited.group || last.sequence != status.awaited.sequence)
    return "in operation" + number + in;
  if (last.of.ends_with("()")) return "in " + last.of + in;
  return "in " + operation + number + (last.of.empty() ? "" : " of " + last.of) + in;
}

}  // namespace

GroupsWatch::GroupsWatch(Group::State& all) : all_(all), board_(all.store, all.rank, all.world_size) {
  for (int rank = 0; rank < all.world_size; ++rank) bits_.push_back(all.on_page.bit(rank));
}

void GroupsWatch::start() {
  if (!thread_.is_ours()) thread_.start(kLook, [this] { return look(); });
}

std::string GroupsWatch::told() const {
  const MutexLock lock(mutex_);
  return told_;
}

void GroupsWatch::end(const std::vector<int>& ranks, const std::string& why) noexcept {
  if (!thread_.is_ours() || !told().empty()) return;
  try {
    const GroupsBoard::Verdict verdict{.ranks = ranks, .is_deadlock = false, .why = why};
    board_.tell(verdict);
    finish(verdict);
  } catch (const std::exception&) {  // the store is gone with a rank or the launcher, which the engines report
  }
}

void GroupsWatch::leave(const std::string& scope, const std::string& place) noexcept {
  if (!thread_.is_ours() || !told().empty()) return;
  try {
    WaitRecord record{.place = place};
    count_calls(record, own_page().read(all_.world_size));
    board_.leave(scope, record);
  } catch (const std::exception&) {  // as above
  }
}

std::string GroupsWatch::departed(const std::string& scope) const noexcept {
  try {
    const WaitRecords gone = board_.departures(scope);
    return places_of(gone, known_ones(gone));
  } catch (const std::exception&) {  // as above
    return "";
  }
}

std::optional<GroupsWatch::Wait> GroupsWatch::Look::wait() const {
  if (!status.waiting) return std::nullopt;
  const uint64_t beats = status.beats - status.heartbeats;
  if (status.awaited.group != 0 || !message || message->message.number == 0)
    return Wait{status.awaited.group, status.awaited.collective, beats, std::nullopt};
  const auto& [is_send, peer, tag, number, entry] = message->message;
  return Wait{message->group, number, beats, WaitRecord::Message{is_send, message->needs_receive, tag}};
}

GroupsWatch::Look GroupsWatch::look_at_self() const { return {own_page().read(all_.world_size), WaitedMessage::now()}; }

bool GroupsWatch::look() {
  if (!all_.membership->is_open() || !told().empty()) return false;
  const std::optional<Wait> now = look_at_self().wait();
  if (!now || wait_ != now) {
    wait_ = now;
    ++serial_;
    since_ = Clock::now();
    next_comparison_ = since_ + kPatience;
    interval_ = kFirstInterval;
    seen_.clear();
    withdraw();
    return true;
  }
  if (const auto verdict = board_.told()) {
    finish(*verdict);
    return false;
  }
  if (Clock::now() >= next_comparison_) compare();
  return told().empty();
}

void GroupsWatch::withdraw() {
  if (std::exchange(has_said_, false)) board_.say(std::nullopt);
}

void GroupsWatch::count_calls(WaitRecord& record, const RankStatus& status) const {
  for (const RankStatus::Group& group : status.groups) record.called[group.id] = group.collectives;
  for (const auto& group : all_.membership->groups()) {
    const uint64_t id = group->on_page.id();
    if (id == 0) continue;
    group->messages.visit(group->world_size, [&](const MessageCounts::Counted& one) {
      record.messages[{id, group->on_page.bit(one.peer), one.is_send, one.tag}] = {one.calls, one.done};
    });
  }
}

WaitRecord GroupsWatch::record_of(const Look& here) const {
  const Wait wait = here.wait().value();
  const CallPlace::Now call = CallPlace::now();
  WaitRecord record{.serial = serial_,
                    .caller = call.caller,
                    .group = wait.group,
                    .number = wait.number,
                    .needs = wait.message ? here.message->needs : here.status.awaited.needs,
                    .needs_some = !wait.message && here.status.awaited.needs_some,
                    .message = wait.message};
  count_calls(record, here.status);
  std::string group = "a group", operation = here.status.operation.kind;
  for (const RankStatus::Group& one : here.status.groups)
    if (one.id == wait.group) group = one.text();
  for (const auto& one : all_.membership->groups())
    if (one->on_page.id() == wait.group) operation = CallGuard::operation(one->caller);
  record.place = !call.text.empty() ? "in " + call.text
                 : wait.message     ? place_of(*here.message, group)
                                    : place_of(here.status, operation, group);
  return record;
}

bool GroupsWatch::is_certain(const WaitRecords& records, const std::vector<bool>& stuck, const Departures& gone) {
  std::vector<uint64_t> serials;
  std::set<uint64_t> groups;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    serials.push_back(stuck[rank] ? records[rank]->serial : 0);
    if (stuck[rank]) groups.insert(records[rank]->group);
  }
  if (std::exchange(seen_, serials) != serials) return false;
  const bool is_one = groups.size() == 1 && gone.empty();
  return Clock::now() - since_ >= (is_one ? kKnownToEngine : kKnownElsewhere);
}

/// The launcher reads it, too.
void GroupsWatch::note_callers() {
  const auto waiting = WaitOnPage::only_waiting_thread();
  const bool may_act = another_thread_may_act(waiting.value_or(own_page().caller()));
  // A thread that waited for something else at that moment and uses groups would be among the waiting ones by now.
  if (waiting && !may_act && WaitOnPage::only_waiting_thread() == waiting) own_page().note_only_caller(*waiting);
  own_page().note_free_threads(may_act);
}

void GroupsWatch::compare() {
  next_comparison_ = Clock::now() + interval_;
  interval_ = std::min(interval_ * 3 / 2, kLongestInterval);
  note_callers();  // before this rank is looked at
  const Look here = look_at_self();
  // A page shows only one thread's wait.
  if (!here.status.has_one_caller) return withdraw();
  if (here.wait() != wait_ || wait_->group == 0) return;
  const WaitRecord own = record_of(here);
  if (look_at_self().wait() != wait_) return;  // calls counted since then belong to another wait
  board_.say(own);
  has_said_ = true;
  const WaitRecords records = board_.records(own);
  Departures gone;
  for (const auto& record : records)
    if (record && !record->caller.scope.empty() && !gone.contains(record->caller.scope))
      gone[record->caller.scope] = board_.departures(record->caller.scope);
  std::erase_if(gone, [](const auto& of) { return of.second.empty(); });
  const std::vector<bool> stuck = ranks_that_never_go_on(records, bits_, gone);
  if (!stuck[static_cast<size_t>(all_.rank)] || !is_certain(records, stuck, gone)) return;
  GroupsBoard::Verdict verdict{.is_deadlock = true, .why = deadlock_text(records, stuck, gone)};
  for (int rank = 0; rank < all_.world_size; ++rank)
    if (stuck[static_cast<size_t>(rank)]) verdict.ranks.push_back(rank);
  // One of them reports for all.
  const auto first = static_cast<size_t>(verdict.ranks.front());
  if (!board_.is_first(std::to_string(first) + '/' + std::to_string(records[first]->serial))) return;
  board_.tell(verdict);
  finish(verdict);
}

/// A rank that ends breaks connections, and perhaps the store, so by then all must have read the reason.
void GroupsWatch::finish(const GroupsBoard::Verdict& verdict) {
  {
    const MutexLock lock(mutex_);
    told_ = verdict.why;
  }
  if (verdict.is_deadlock) own_page().fail(RankFailure::kMismatch, -1, verdict.why);
  try {
    board_.note_read();
    for (const Deadline deadline(kOthers); !board_.have_read(verdict.ranks) && !deadline.passed();)
      std::this_thread::sleep_for(kPause);
  } catch (const std::exception&) {  // as above
  }
  all_.membership->interrupt(verdict.why);
}

}  // namespace lockstep
