#include "collectives/gloo/flight_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/rank_names.h"
#include "base/text.h"
#include "base/thread_token.h"
#include "collectives/purpose.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep::gloo_engine {
namespace {

/// More than a program has in flight at once.
constexpr size_t kHistory = 64;

}  // namespace

std::string Entry::shown() const { return call_of_purpose(text, purpose); }

Entry FlightRecorder::add(std::string text) {
  for (const char letter : text) hash_ = (hash_ ^ static_cast<unsigned char>(letter)) * 16777619u;  // FNV-1a
  const MutexLock lock(mutex_);
  history_.push_back({++count_, std::move(text), printable(OperationLabel::current())});
  if (history_.size() > kHistory) history_.pop_front();
  return history_.back();
}

std::string FlightRecorder::Dump::packed() const {
  std::ostringstream text;
  const auto write = [&](const Entry& entry) {
    text << entry.number << ' ' << entry.text << '\n' << entry.purpose << '\n';
  };
  text << static_cast<int>(state) << ' ' << unfinished << ' ' << launched << ' ';
  write(now);
  for (const Entry& entry : history) write(entry);
  return text.str();
}

FlightRecorder::Dump FlightRecorder::Dump::unpacked(const std::string& bytes) {
  Dump dump;
  std::istringstream text(bytes);
  const auto read = [&](Entry& entry) {
    text >> entry.number;
    text.get();
    return std::getline(text, entry.text) && std::getline(text, entry.purpose);
  };
  int state = 0;
  text >> state >> dump.unfinished >> dump.launched;
  dump.state = static_cast<State>(state);
  read(dump.now);
  for (Entry entry{}; read(entry);) dump.history.push_back(entry);
  return dump;
}

const Entry* FlightRecorder::Dump::entry(uint64_t number) const {
  for (const Entry& entry : history)
    if (entry.number == number) return &entry;
  return now.number == number ? &now : nullptr;
}

FlightRecorder::Dump FlightRecorder::own_dump(const Entry& entry, Dump::State state) const {
  Dump dump{.state = state, .now = entry, .launched = rank_of_process(::getpid())};
  const MutexLock lock(mutex_);
  dump.history = history_;
  return dump;
}

bool FlightRecorder::exchange(const Dump& own, Dumps& dumps) const {
  dumps.resize(static_cast<size_t>(world_size_));
  dumps[static_cast<size_t>(rank_)] = own;
  try {
    store_->set(key(rank_), own.packed());
    for (int rank = 0; rank < world_size_; ++rank)
      if (rank != rank_ && store_->check({key(rank)}))
        dumps[static_cast<size_t>(rank)] = Dump::unpacked(store_->get_to_str(key(rank)));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

/// The first collective that two ranks recorded differently, worded as in shared memory. A collective keeps its number,
/// so an old report is as good as a new one.
std::string FlightRecorder::mismatch(const Dumps& dumps) {
  std::optional<uint64_t> first;
  for (const auto& dump : dumps)
    for (const Entry& entry : dump ? dump->history : std::deque<Entry>())
      for (const auto& other : dumps) {
        const Entry* theirs = other ? other->entry(entry.number) : nullptr;
        if (theirs != nullptr && theirs->text != entry.text)
          first = std::min(first.value_or(entry.number), entry.number);
      }
  if (!first) return "";
  std::vector<std::string> texts, purposes;
  for (const auto& dump : dumps) {
    const Entry* entry = dump ? dump->entry(*first) : nullptr;
    texts.push_back(entry ? entry->shown() : "");
    purposes.push_back(entry ? entry->purpose : "");
  }
  std::string said = "ranks disagree on operation " + std::to_string(*first) + ":";
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (!texts[rank].empty() && std::find(texts.begin(), texts.begin() + static_cast<long>(rank), texts[rank]) ==
                                    texts.begin() + static_cast<long>(rank))
      said += (said.back() == ':' ? " " : ", ") + ranks_with(texts, texts[rank]) + " called " + texts[rank];
  const std::string advice = advice_on(purposes);
  return advice.empty() ? said : said + "." + advice;
}

std::string FlightRecorder::positions(const Dumps& dumps) {
  std::vector<std::string> places;
  for (const auto& dump : dumps) {
    if (!dump)
      places.emplace_back("reported nothing: it has ended or is doing something else");
    else
      places.push_back((dump->state == Dump::State::kWaits    ? "last seen waiting in operation "
                        : dump->state == Dump::State::kFailed ? "failed in operation "
                                                              : "left after operation ") +
                       std::to_string(dump->now.number) + ", " + dump->now.shown());
  }
  std::string said;
  for (size_t rank = 0; rank < places.size(); ++rank)
    if (std::find(places.begin(), places.begin() + static_cast<long>(rank), places[rank]) ==
        places.begin() + static_cast<long>(rank))
      said += (said.empty() ? "" : "; ") + ranks_with(places, places[rank]) + " " + places[rank];
  return "where the ranks are: " + said;
}

void FlightRecorder::interrupt(const std::string& why) {
  const MutexLock lock(mutex_);
  interruption_ = why;
}

std::string FlightRecorder::interruption() const {
  const MutexLock lock(mutex_);
  return interruption_;
}

std::string FlightRecorder::departure(const Dumps& dumps, const Entry& entry) const {
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto& dump = dumps[static_cast<size_t>(rank)];
    if (!dump || dump->state != Dump::State::kLeft) continue;
    const bool left_it = dump->unfinished != 0 && dump->unfinished <= entry.number && entry.number <= dump->now.number;
    if (dump->now.number >= entry.number && !left_it) continue;
    const std::string last = dump->now.number == 0 ? "it had not started any operation"
                                                   : "the last operation it started was operation " +
                                                         std::to_string(dump->now.number) + ", " + dump->now.shown();
    const std::string text = "rank " + std::to_string(rank) + " has already left the group, but rank " +
                             std::to_string(rank_) + " called operation " + std::to_string(entry.number) + ", " +
                             entry.shown() + "; " + last +
                             (left_it ? ", for which it did not wait. Wait for every Work before you leave the group."
                                      : ". All ranks must call the same operations.");
    own_page().fail(RankFailure::kPeer, dump->launched, text);
    return text;
  }
  return "";
}

void FlightRecorder::leave_word(uint64_t unfinished) {
  if (failed_ || generation_ != fork_generation() || has_left_.exchange(true)) return;
  Dump word = own_dump(Entry{}, Dump::State::kLeft);
  if (!word.history.empty()) word.now = word.history.back();
  word.unfinished = unfinished;
  try {
    store_->set(key(rank_), word.packed());
  } catch (const std::exception&) {
    // The store is gone, and with it every reader.
  }
}

std::string FlightRecorder::explain(const std::string& cause, const Entry& entry, std::chrono::milliseconds timeout) {
  const std::string said = after_failure(entry, timeout);
  return explains_ ? said : cause + "; " + said;
}

std::string FlightRecorder::compare(const Entry& entry) {
  if (std::string why = interruption(); !why.empty()) return why;
  Dumps dumps;
  exchange(own_dump(entry, Dump::State::kWaits), dumps);
  if (mismatch(dumps).empty()) return departure(dumps, entry);
  // The others find the same mismatch at their next look; then all of them can be named.
  return after_failure(entry, std::chrono::milliseconds(500));
}

std::string FlightRecorder::after_failure(const Entry& entry, std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  failed_ = true;
  const Dump own = own_dump(entry, Dump::State::kFailed);
  Dumps dumps;
  bool answers = exchange(own, dumps);
  const auto says_more = [](const auto& dump) { return !dump || dump->state == Dump::State::kWaits; };
  while (answers && std::any_of(dumps.begin(), dumps.end(), says_more) && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    answers = exchange(own, dumps);
  }
  std::string different = mismatch(dumps);
  if (!different.empty())
    own_page().fail(RankFailure::kMismatch, -1, different);
  else
    different = departure(dumps, entry);
  explains_ = !different.empty();
  return explains_ ? different : positions(dumps);
}

namespace {

/// Never destroyed.
struct Recorders {
  Mutex mutex;
  std::vector<std::pair<std::weak_ptr<FlightRecorder>, const void*>> known LOCKSTEP_GUARDED_BY(mutex);  ///< and thread

  static Recorders& get() {
    static auto* const kAll = new Recorders;
    return *kAll;
  }
};

void leave_all() {
  Recorders& all = Recorders::get();
  const MutexLock lock(all.mutex);
  for (const auto& [known, thread] : all.known)
    if (const auto recorder = known.lock(); recorder && thread == thread_token()) recorder->leave_word();
}

}  // namespace

void leave_word_at_exit(const std::shared_ptr<FlightRecorder>& recorder) {
  [[maybe_unused]] static const bool kRegistered = std::atexit(leave_all) == 0;
  Recorders& all = Recorders::get();
  const MutexLock lock(all.mutex);
  std::erase_if(all.known, [](const auto& known) { return known.first.expired(); });
  all.known.emplace_back(recorder, thread_token());
}

}  // namespace lockstep::gloo_engine
