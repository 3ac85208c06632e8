#include "fully_sharded/failure_watch.h"

#include <algorithm>
#include <utility>

#include "collectives/engine_interfaces.h"
#include "collectives/group_state.h"
#include "fully_sharded/model_call.h"
#include "rank_page/rank_board.h"

namespace lockstep::fully_sharded {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{200};                             ///< between two looks of a rank that waits
constexpr milliseconds kPatience{1000};                        ///< shorter waits are not compared
constexpr milliseconds kFirstPause{400}, kLongestPause{1500};  ///< between two comparisons of one wait
constexpr milliseconds kOthers{1000};                          ///< for what the others say
constexpr milliseconds kPause{10};

// What ranks write: why one cannot go on; why all must end, for which there is one place; that this was read.
constexpr const char *kTrouble = "trouble", *kEnd = "end", *kRead = "read";

void interrupt(const Group& group, const std::string& why) {
  if (auto* const able = dynamic_cast<Interruptible*>(state_of(group).backend.get())) able->interrupt(why);
}

}  // namespace

FailureWatch::FailureWatch(const MachineGroups& groups, int model)
    : groups_(groups), prefix_("lockstep/fully_sharded/" + groups.nonce() + '/' + std::to_string(model) + '/') {
  const Group& all = groups_.all();
  if (all.world_size() == 1) return;
  for (int rank = 0; rank < all.world_size(); ++rank) bits_.push_back(state_of(all).on_page.bit(rank));
  thread_.start(kLook, [this] { return look(); });
}

FailureWatch::~FailureWatch() {
  if (!thread_.is_ours()) return;
  thread_.stop();
  if (is_over()) return;
  try {
    RankRecord record = own_record(own_page().read(groups_.all().world_size()));
    record = {.is_gone = true, .place = "has destroyed its model", .called = std::move(record.called)};
    state_of(groups_.all()).store->set(record_key(groups_.all().rank()), record.packed());
  } catch (const std::exception&) {  // the store has gone with a rank or the launcher, of which the engines tell
  }
}

bool FailureWatch::is_over() const {
  const MutexLock lock(mutex_);
  return ended_ || !groups_.all().is_open();
}

std::string FailureWatch::key(const char* kind, int rank) const {
  const MutexLock lock(mutex_);
  return prefix_ + std::to_string(told_) + '/' + kind + (kind == kEnd ? "" : '/' + std::to_string(rank));
}

void FailureWatch::write(const char* kind, const std::string& text) const {
  state_of(groups_.all()).store->set(key(kind, groups_.all().rank()), text);
}

bool FailureWatch::all_have_written(const char* kind, const std::vector<bool>& by) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < groups_.all().world_size(); ++rank)
    if (by[static_cast<size_t>(rank)]) keys.push_back(key(kind, rank));
  return state_of(groups_.all()).store->check(keys);
}

bool FailureWatch::wait_until_written(const char* kind, const std::vector<bool>& by) const {
  for (const Deadline deadline(kOthers); !all_have_written(kind, by);) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

void FailureWatch::tell(const std::string& trouble) noexcept {
  if (!thread_.is_ours() || is_over()) return;
  try {
    const std::vector<bool> all(static_cast<size_t>(groups_.all().world_size()), true);
    write(kTrouble, trouble);
    if (wait_until_written(kTrouble, all)) {
      const MutexLock lock(mutex_);
      ++told_;
      return;
    }
    end_all("rank " + std::to_string(groups_.all().rank()) + ": " + trouble, all);
  } catch (const std::exception&) {  // as above
  }
}

void FailureWatch::end_all(const std::string& why, const std::vector<bool>& waiting) {
  write(kRead, "");
  write(kEnd, why);
  wait_until_written(kRead, waiting);
  end(why);
}

void FailureWatch::end(const std::string& why) {
  {
    const MutexLock lock(mutex_);
    ended_ = true;
  }
  for (const Group* group : {groups_.here(), groups_.rail(), &groups_.all()})
    if (group != nullptr) interrupt(*group, why);
}

std::string FailureWatch::departed() const noexcept {
  if (!thread_.is_ours()) return "";
  try {
    const RankRecords all = records();
    std::vector<bool> gone;
    for (const auto& record : all) gone.push_back(record && record->is_gone);
    return std::find(gone.begin(), gone.end(), true) == gone.end() ? "" : places_of(all, gone);
  } catch (const std::exception&) {  // as above
    return "";
  }
}

bool FailureWatch::look() {
  if (is_over()) return false;
  const RankStatus status = own_page().read(groups_.all().world_size());
  c10d::Store& store = *state_of(groups_.all()).store;
  const Wait now{status.awaited.group, status.awaited.collective, status.beats - status.heartbeats};
  if (!status.waiting || wait_ != now) {
    wait_ = status.waiting ? std::optional(now) : std::nullopt;
    next_comparison_ = Clock::now() + kPatience;
    pause_ = kFirstPause;
    found_ = false;
    if (!said_.empty()) store.set(record_key(groups_.all().rank()), said_ = "");
  }
  if (!status.waiting) return true;
  if (const std::string place = key(kEnd, 0); store.check({place})) {
    const std::string why = store.get_to_str(place);
    write(kRead, "");
    end(why);
    return false;
  }
  if (Clock::now() >= next_comparison_) compare_waits();
  return true;
}

RankRecord FailureWatch::own_record(const RankStatus& status) const {
  const std::string call = ModelCall::current();
  RankRecord record{.in_call = !call.empty(),
                    .place = "in " + (call.empty() ? status.operation.text() : call),
                    .group = status.awaited.group,
                    .collective = status.awaited.collective,
                    .needs = status.awaited.needs};
  for (const RankStatus::Group& group : status.groups) record.called[group.id] = group.collectives;
  return record;
}

RankRecords FailureWatch::exchanged(const RankRecord& own) {
  if (const std::string mine = own.packed(); said_ != mine)
    state_of(groups_.all()).store->set(record_key(groups_.all().rank()), said_ = mine);
  return records();
}

RankRecords FailureWatch::records() const {
  const Group& all = groups_.all();
  c10d::Store& store = *state_of(all).store;
  RankRecords records(static_cast<size_t>(all.world_size()));
  for (int rank = 0; rank < all.world_size(); ++rank) {
    if (!store.check({record_key(rank)})) continue;
    if (const std::string text = store.get_to_str(record_key(rank)); !text.empty())
      records[static_cast<size_t>(rank)] = RankRecord::unpacked(text);
  }
  return records;
}

void FailureWatch::compare_waits() {
  next_comparison_ = Clock::now() + pause_;
  pause_ = std::min(pause_ * 3 / 2, kLongestPause);
  const RankStatus status = own_page().read(groups_.all().world_size());
  // A page shows the wait of one thread.
  const Wait now{status.awaited.group, status.awaited.collective, status.beats - status.heartbeats};
  if (!status.has_one_caller || !status.waiting || wait_ != now || now.group == 0) return;
  const RankRecords records = exchanged(own_record(status));
  const std::vector<bool> stuck = ranks_that_never_go_on(records, bits_);
  std::vector<bool> waiting = stuck;
  for (size_t rank = 0; rank < stuck.size(); ++rank)
    if (stuck[rank] && records[rank]->is_gone) waiting[rank] = false;
  // One of them speaks for all.
  const auto first = std::find(waiting.begin(), waiting.end(), true);
  if (first - waiting.begin() != groups_.all().rank()) return;
  // Others that have waited for less time will say where, too.
  if (!std::exchange(found_, true) && std::find(records.begin(), records.end(), std::nullopt) != records.end()) return;
  end_all(
      "the ranks of a FullyShardedDataParallel wait for each other, so none can go on: " + places_of(records, stuck) +
          ". Every rank makes the same calls of the model, in the same order, and runs as many forwards and "
          "backwards",
      waiting);
}

}  // namespace lockstep::fully_sharded
