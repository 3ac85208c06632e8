#include "nn/exchange_watch.h"

#include <algorithm>
#include <thread>

#include "collectives/engine_interfaces.h"
#include "collectives/group_state.h"
#include "collectives/operation_count.h"
#include "nn/layer_error.h"
#include "rank_page/rank_board.h"

// Ranks that wait for each other (exchange_records.cpp) must have done so for most of a second, and must be seen so
// twice, since ranks look at different times; once suffices if another rank, which will leave soon, has decided.

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPause{250};     ///< between two looks
constexpr std::chrono::milliseconds kPatience{800};  ///< shorter waits are not reported
constexpr std::chrono::milliseconds kOthers{1000};   ///< how long to wait for the others' records

void interrupt(const c10::intrusive_ptr<c10d::Backend>& engine, const std::string& why) {
  if (auto* const able = dynamic_cast<Interruptible*>(engine.get())) able->interrupt(why);
}

}  // namespace

ExchangeWatch::ExchangeWatch(const Group& group, c10::intrusive_ptr<c10d::Backend> around)
    : group_(group), around_(std::move(around)), board_(state_of(group).store, group.rank(), group.world_size()) {
  thread_.start(kPause, [this] { return watch(); });
}

void ExchangeWatch::enter(const std::string& what, const std::string& place) {
  const MutexLock lock(mutex_);
  ++exchanges_;
  inside_ = true;
  what_ = what;
  place_ = place;
}

void ExchangeWatch::leave() {
  const MutexLock lock(mutex_);
  inside_ = false;
}

std::string ExchangeWatch::verdict() {
  const MutexLock lock(mutex_);
  return verdict_;
}

std::string ExchangeWatch::places() {
  std::string mine;
  {
    const MutexLock lock(mutex_);
    mine = place_;
  }
  SaidByRanks records;
  const Deadline deadline(kOthers);
  try {
    do {
      records = board_.tell(ExchangeBoard::kFailed, mine);
      if (std::all_of(records.begin(), records.end(), [](const auto& one) { return one.has_value(); })) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } while (!deadline.passed());
  } catch (const std::exception&) {  // the store is gone, so nothing is known about the others
    return "";
  }
  if (std::count(records.begin(), records.end(), std::nullopt) == group_.world_size() - 1) return "";
  return said_by_rank(records);
}

ExchangeRecord::Look ExchangeWatch::look() const {
  const RankStatus status = own_page().read(group_.world_size());
  return {.waits = status.waiting,
          .inside = inside_,
          .exchanges = exchanges_,
          .others = operations_started.load() - exchanges_,
          .beats = status.beats - status.heartbeats};
}

ExchangeRecord ExchangeWatch::record(const ExchangeRecord::Look& now) const {
  return {now, now.inside ? what_ : "", now.inside ? place_ : own_page().read(group_.world_size()).operation.text()};
}

bool ExchangeWatch::watch() {
  if (!group_.is_open()) return false;
  MutexLock lock(mutex_);
  const ExchangeRecord::Look now = look();
  const bool stands = now.waits && now == last_;
  last_ = now;
  if (!stands) {
    since_ = Clock::now();
    before_.clear();
  }
  if (!told_ && (!stands || Clock::now() - since_ < kPatience)) return true;
  const std::string mine = stands ? record(now).packed() : "";
  lock.unlock();
  // If the store is gone, with a rank or the launcher, this throws, and the engines report it.
  const SaidByRanks records = board_.tell(ExchangeBoard::kWaits, mine);
  told_ = stands;
  const bool holds = stands && (records == before_ || board_.is_decided_elsewhere());
  before_ = records;
  const std::string verdict = holds ? verdict_on(records) : "";
  if (verdict.empty()) return true;
  decide(verdict);
  return false;
}

/// A rank that learns of the verdict ends, and so do others that must report it, too; so all learn of it first. Both
/// groups, and all others, end on every rank, whichever it waits in: a rank that has left before another's thread got
/// this far must have ended the operation that the other waits for.
void ExchangeWatch::decide(const std::string& verdict) {
  {
    const MutexLock lock(mutex_);
    verdict_ = verdict;
  }
  try {
    const Deadline deadline(kOthers);
    const auto tell = [this] { return board_.tell(ExchangeBoard::kDecided, "yes"); };
    for (SaidByRanks records = tell();
         std::find(records.begin(), records.end(), std::nullopt) != records.end() && !deadline.passed();
         records = tell())
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } catch (const std::exception&) {
  }
  // A model may reduce its gradients over another group than the one whose statistics are exchanged.
  interrupt(around_, verdict);
  state_of(group_).membership->interrupt(verdict);
  interrupt(state_of(group_).backend, verdict);
}

}  // namespace lockstep
