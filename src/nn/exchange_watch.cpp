#include "nn/exchange_watch.h"

#include <algorithm>
#include <sstream>

#include "base/clock.h"
#include "base/rank_names.h"
#include "base/shared_segment.h"
#include "collectives/engine_interfaces.h"
#include "collectives/group_state.h"
#include "nn/layer_error.h"
#include "rank_page/rank_board.h"

// When is a wait without end? Every rank waits, at least one of them in an exchange that another one has not begun, and
// this other one has begun a collective that the first has not. Then neither can ever come to the other. All must have
// stood like this for most of a second, and be seen so twice, since ranks look at different times; once suffices where
// another rank has decided, which will leave soon.

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPause{250};      ///< between two looks
constexpr std::chrono::milliseconds kPatience{800};  ///< a wait that is shorter is told to nobody
constexpr std::chrono::milliseconds kOthers{1000};    ///< how long to wait for what the others say

// What ranks say of themselves, by the reason.
constexpr const char *kWaits = "waits", *kFailed = "failed", *kDecided = "decided";

void interrupt(const c10::intrusive_ptr<c10d::Backend>& engine, const std::string& why) {
  if (auto* const able = dynamic_cast<Interruptible*>(engine.get())) able->interrupt(why);
}

std::string line_of(const std::string& text) {
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

}  // namespace

std::string ExchangeWatch::Record::packed() const {
  std::ostringstream text;
  text << look.inside << ' ' << look.exchanges << ' ' << look.others << ' ' << look.beats << '\n'
       << line_of(what) << '\n'
       << line_of(place);
  return text.str();
}

ExchangeWatch::Record ExchangeWatch::Record::unpacked(const std::string& packed) {
  Record record{};
  std::istringstream text(packed);
  text >> record.look.inside >> record.look.exchanges >> record.look.others >> record.look.beats;
  text.get();
  std::getline(text, record.what);
  std::getline(text, record.place);
  return record;
}

ExchangeWatch::ExchangeWatch(const Group& group, c10::intrusive_ptr<c10d::Backend> around)
    : group_(group),
      rank_(group.rank()),
      world_size_(group.world_size()),
      store_(state_of(group).store),
      around_(std::move(around)),
      generation_(fork_generation()) {
  // What this rank wrote for an earlier group over the same store.
  for (const char* kind : {kWaits, kFailed, kDecided}) store_->deleteKey(key(kind, rank_));
  thread_ = std::thread([this] { watch(); });
}

ExchangeWatch::~ExchangeWatch() {
  if (generation_ != fork_generation()) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  wakes_.notify_all();
  thread_.join();
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
  Records records;
  const Deadline deadline(kOthers);
  try {
    do {
      records = tell(kFailed, mine);
      if (std::all_of(records.begin(), records.end(), [](const auto& one) { return one.has_value(); })) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } while (!deadline.passed());
  } catch (const std::exception&) {  // the store is gone, so nothing is known of the others
    return "";
  }
  if (std::count(records.begin(), records.end(), std::nullopt) == world_size_ - 1) return "";
  return said_by_rank(records);
}

ExchangeWatch::Look ExchangeWatch::look() const {
  const RankStatus status = own_page().read(world_size_);
  return {.waits = status.waiting,
          .inside = inside_,
          .exchanges = exchanges_,
          .others = operations_started.load(std::memory_order_relaxed) - exchanges_,
          .beats = status.beats - status.heartbeats};
}

ExchangeWatch::Record ExchangeWatch::record(const Look& now) const {
  return {now, now.inside ? what_ : "", now.inside ? place_ : own_page().read(world_size_).operation.text()};
}

std::string ExchangeWatch::key(const char* kind, int rank) const {
  return std::string("batch_norm/") + kind + "/" + std::to_string(rank);
}

ExchangeWatch::Records ExchangeWatch::tell(const char* kind, const std::string& mine) const {
  Records records(static_cast<size_t>(world_size_));
  store_->set(key(kind, rank_), mine);
  for (int rank = 0; rank < world_size_; ++rank) {
    auto& record = records[static_cast<size_t>(rank)];
    if (rank == rank_)
      record = mine;
    else if (store_->check({key(kind, rank)}))
      record = store_->get_to_str(key(kind, rank));
    if (record && record->empty()) record.reset();
  }
  return records;
}

std::string ExchangeWatch::judge(const Records& records) const {
  std::vector<Record> all;
  for (const auto& packed : records) {
    if (!packed) return "";
    all.push_back(Record::unpacked(*packed));
  }
  const auto never = [&](const Record& in, const Record& out) {
    return in.look.inside && out.look.exchanges < in.look.exchanges && out.look.others > in.look.others;
  };
  for (const Record& in : all)
    for (const Record& out : all) {
      if (!never(in, out)) continue;
      std::vector<std::optional<std::string>> places;
      for (const Record& one : all) places.push_back(one.place);
      return layer_error(in.what, "The ranks wait for each other: " + said_by_rank(places)).what();
    }
  return "";
}

void ExchangeWatch::watch() {
  std::optional<Look> last;
  Records before;
  bool told = false;
  auto since = Clock::now();
  MutexLock lock(mutex_);
  while (!ends_) {
    wakes_.wait_for(lock.native(), kPause);
    if (ends_ || !group_.is_open()) return;
    const Look now = look();
    const bool stands = now.waits && now == last;
    last = now;
    if (!stands) {
      since = Clock::now();
      before.clear();
    }
    if (!told && (!stands || Clock::now() - since < kPatience)) continue;
    const std::string mine = stands ? record(now).packed() : "";
    lock.unlock();
    std::string verdict;
    try {
      const Records records = tell(kWaits, mine);
      told = stands;
      if (stands && (records == before || is_decided_elsewhere())) verdict = judge(records);
      before = records;
    } catch (const std::exception&) {  // the store has gone with a rank or the launcher, of which the engines will tell
      return;
    }
    if (!verdict.empty()) return decide(verdict);
    lock.lock();
  }
}

bool ExchangeWatch::is_decided_elsewhere() const {
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank != rank_ && store_->check({key(kDecided, rank)})) return true;
  return false;
}

/// Whoever learns of it ends, and takes others with it that are to say the same: so all learn of it first. Both groups
/// end on every rank, whichever it waits in: a rank that has left before another one's thread came so far must have ended
/// what that one waits for.
void ExchangeWatch::decide(const std::string& verdict) {
  {
    const MutexLock lock(mutex_);
    verdict_ = verdict;
  }
  try {
    const Deadline deadline(kOthers);
    for (Records records = tell(kDecided, "yes");
         std::find(records.begin(), records.end(), std::nullopt) != records.end() && !deadline.passed();
         records = tell(kDecided, "yes"))
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } catch (const std::exception&) {
  }
  interrupt(around_, verdict);
  interrupt(state_of(group_).backend, verdict);
}

}  // namespace lockstep
