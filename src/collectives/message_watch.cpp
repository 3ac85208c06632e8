#include "collectives/message_watch.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include <lockstep/error.h>

#include "base/thread_token.h"
#include "collectives/cause.h"
#include "collectives/message_tags.h"
#include "collectives/stuck_ranks.h"
#include "collectives/typed_message.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

/// Whoever comes so late is nearly always there by the first look. Ranks must be seen in the same waits for kSameFor.
constexpr milliseconds kFirstLook{400}, kLongestPause{1500}, kSameFor{900};
constexpr int kRestsBeforeDozing = 5;
constexpr const char* kVerdict = "waits/verdict";

}  // namespace

class MessageWatch::WatchedMessage final : public c10d::Work {
 public:
  WatchedMessage(std::shared_ptr<MessageWatch> watch, WorkPtr inner, const Message& message)
      : watch_(std::move(watch)), inner_(std::move(inner)), message_(message) {
    const MutexLock lock(watch_->mutex_);
    watch_->note_caller();
    place_ = watch_->done_.pending.insert(watch_->done_.pending.end(), message);
  }
  ~WatchedMessage() override {
    const MutexLock lock(watch_->mutex_);
    if (is_done_) return;
    if (has_failed_ || watch_->ending_ || !watch_->verdict_.empty())
      watch_->done_.pending.erase(place_);
    else
      watch_->keep({.work = inner_, .waiter = waiter_, .place = place_});
  }

  bool isCompleted() override {
    if (inner_->isCompleted() || !watch_->verdict().empty()) return true;
    if (!waiter_) waiter_ = std::make_shared<MessageWaiter>(inner_);
    return waiter_->is_done();
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  void abort() override { inner_->abort(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  int sourceRank() const override { return inner_->sourceRank(); }

  bool wait(milliseconds timeout) override {
    require_no_verdict();
    watch_->begin_wait({.message = &message_, .work = inner_.get()});
    bool is_there = false;
    try {
      is_there = waiter_ ? waiter_->wait(timeout) : inner_->wait(timeout);
    } catch (const WrongMessage& wrong) {
      has_failed_ = true;
      watch_->end_wait();
      watch_->declare(wrong.what());
      throw;
    } catch (const std::exception& cause) {
      has_failed_ = true;
      watch_->end_wait();
      require_no_verdict();
      const std::string left = message_.is_send ? "" : watch_->unreceived_from(message_.peer);
      if (!left.empty()) throw Error(cause_of(cause) + "; " + left);
      throw;
    }
    watch_->end_wait();
    if (!is_there) require_no_verdict();
    if (is_there) note_done();
    return is_there;
  }

 private:
  void require_no_verdict() {
    const std::string verdict = watch_->verdict();
    if (!verdict.empty()) throw Error(verdict);
  }

  void note_done() {
    const MutexLock lock(watch_->mutex_);
    if (!std::exchange(is_done_, true)) watch_->note_done(place_);
  }

  const std::shared_ptr<MessageWatch> watch_;
  const WorkPtr inner_;
  const Message message_;
  std::list<Message>::iterator place_;  ///< among the pending ones, until it is done
  std::shared_ptr<MessageWaiter> waiter_;  ///< since somebody has asked whether it is done
  bool is_done_ = false, has_failed_ = false;
};

MessageWatch::MessageWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                           std::function<void(const std::string&)> tell)
    : store_(std::move(store)), rank_(rank), world_size_(world_size), tell_(std::move(tell)) {
  store_->deleteKey(key(rank_));
  for (int peer = 0; peer < world_size_; ++peer) store_->deleteKey(key_of_tags(rank_, peer));
  if (rank_ == 0) store_->deleteKey(kVerdict);
}

void MessageWatch::stop() {
  std::thread threads[2];
  if (fork_generation_ != fork_generation()) {  // the threads belong to the process that forked
    for (std::thread* thread : {&thread_, &keeper_})
      if (thread->joinable()) thread->detach();
    return;
  }
  {
    const MutexLock lock(mutex_);
    if (!ending_) leave_tags();
    ending_ = true;
    threads[0].swap(thread_);
    threads[1].swap(keeper_);
    if (!dropped_.empty()) dropped_.front().work->abort();
  }
  changed_.notify_all();
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
  dropped_.clear();
}

void MessageWatch::leave_tags() {
  std::map<int, std::vector<int64_t>> tags;
  for (const Message& message : done_.pending)
    if (message.is_send) tags[message.peer].push_back(message.tag);
  try {
    for (const auto& [peer, list] : tags) store_->set(key_of_tags(rank_, peer), text_of_tags(list));
  } catch (const std::exception&) {
    // Without a store nobody can be told.
  }
}

std::string MessageWatch::unreceived_from(int rank) const {
  try {
    if (!store_->check({key_of_tags(rank, rank_)})) return "";
    const std::string sender = "rank " + std::to_string(rank), receiver = "rank " + std::to_string(rank_);
    const std::string tags = store_->get_to_str(key_of_tags(rank, rank_));
    return sender + " has left the group. " + unreceived(sender, receiver, tags);
  } catch (const std::exception&) {
    return "";
  }
}

void MessageWatch::note_done(std::list<Message>::iterator place) {
  ++(place->is_send ? done_.sent : done_.received)[place->peer];
  done_.pending.erase(place);
}

void MessageWatch::keep(Dropped message) {
  dropped_.push_back(std::move(message));
  if (!keeper_.joinable()) keeper_ = std::thread([this] { finish_dropped(); });
  changed_.notify_all();
}

void MessageWatch::finish_dropped() {
  constexpr auto kForever = std::chrono::hours(24 * 365);  // a time limit would end the group, which nobody waits for
  MutexLock lock(mutex_);
  while (!ending_) {
    if (dropped_.empty()) {
      changed_.wait(lock.native());
      continue;
    }
    const Dropped& first = dropped_.front();
    lock.unlock();
    bool is_there = false;
    try {
      is_there = first.waiter ? first.waiter->wait(milliseconds(0)) : first.work->wait(kForever);
    } catch (const WrongMessage& wrong) {
      declare(wrong.what());
    } catch (const std::exception&) {  // the group has ended, of which others hear
    }
    lock.lock();
    if (is_there)
      note_done(first.place);
    else
      done_.pending.erase(first.place);
    std::list<Dropped> done;
    done.splice(done.begin(), dropped_, dropped_.begin());
    lock.unlock();
    done.clear();
    lock.lock();
  }
}

void MessageWatch::expect_several_callers() {
  const MutexLock lock(mutex_);
  several_callers_ = true;
}

WorkPtr MessageWatch::watched(WorkPtr inner, const Message& message) {
  if (!inner) return inner;
  return c10::make_intrusive<WatchedMessage>(shared_from_this(), std::move(inner), message);
}

void MessageWatch::note_collective() {
  const MutexLock lock(mutex_);
  note_caller();
  ++done_.called;
}

MessageWatch::CollectiveWait::CollectiveWait(MessageWatch& watch, uint64_t number, const std::string& text)
    : watch_(watch) {
  watch_.begin_wait({.number = number, .text = &text});
}

std::string MessageWatch::verdict() {
  const MutexLock lock(mutex_);
  return verdict_;
}

void MessageWatch::declare(const std::string& text) {
  own_page().fail(RankFailure::kMismatch, -1, text);
  if (tell_) tell_(text);
  try {
    store_->set(kVerdict, text);
  } catch (const std::exception&) {
    // Without a store nobody can be told.
  }
  const MutexLock lock(mutex_);
  if (verdict_.empty()) verdict_ = text;
}

void MessageWatch::note_caller() {
  const void* const here = thread_token();
  if (caller_ == nullptr) caller_ = here;
  if (caller_ != here) several_callers_ = true;
  if (several_callers_ && published_) changed_.notify_all();
}

void MessageWatch::begin_wait(Wait wait) {
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    note_caller();
    if (wait_) several_callers_ = true;
    wait.serial = ++waits_;
    wait.pause = kFirstLook;
    wait.next_look = coarse_now() + kFirstLook;
    if (wait.message != nullptr) start_thread_locked();
    wait_ = wait;
    wake = dozing_;
  }
  if (wake) changed_.notify_all();
}

void MessageWatch::end_wait() {
  MutexLock lock(mutex_);
  while (looking_) changed_.wait(lock.native());
  wait_.reset();
  if (!std::exchange(published_, false)) return;
  lock.unlock();
  take_back();  // before anything else is called: others rely on it
}

void MessageWatch::take_back() {
  try {
    store_->set(key(rank_), std::string("0"));
  } catch (const std::exception&) {
    // The store is gone, and with it whoever could read this.
  }
}

void MessageWatch::start_thread() {
  const MutexLock lock(mutex_);
  start_thread_locked();
}

void MessageWatch::start_thread_locked() {
  if (!thread_.joinable() && !ending_) thread_ = std::thread([this] { run(); });
}

void MessageWatch::run() {
  MutexLock lock(mutex_);
  for (int rests = 0; !ending_;) {
    const auto now = Clock::now();
    if (several_callers_ && std::exchange(published_, false)) {
      lock.unlock();
      take_back();
      lock.lock();
    }
    if (!wait_) {
      dozing_ = ++rests > kRestsBeforeDozing;
      if (dozing_)
        changed_.wait(lock.native());
      else
        changed_.wait_for(lock.native(), kFirstLook);
      dozing_ = false;
      continue;
    }
    rests = 0;
    if (now < wait_->next_look) {
      changed_.wait_for(lock.native(), std::min<Clock::duration>(kFirstLook, wait_->next_look - now));
      continue;
    }
    const Note own = own_note();
    const bool is_sure = !several_callers_;
    looking_ = true;
    published_ = published_ || is_sure;
    lock.unlock();
    const std::string found = look(own, is_sure);
    if (!found.empty() && tell_) tell_(found);
    lock.lock();
    looking_ = false;
    if (!found.empty()) {
      if (verdict_.empty()) own_page().fail(RankFailure::kMismatch, -1, found);
      verdict_ = found;
      if (wait_ && wait_->work != nullptr) wait_->work->abort();
    }
    changed_.notify_all();
    if (!wait_) continue;
    wait_->pause = std::min(wait_->pause * 3 / 2, kLongestPause);
    wait_->next_look = Clock::now() + wait_->pause;
  }
}

MessageWatch::Note MessageWatch::own_note() const {
  Note note = done_;
  note.serial = wait_->serial;
  if (wait_->message != nullptr)
    note.message = *wait_->message;
  else
    note.text = *wait_->text;
  note.number = wait_->number;
  return note;
}

std::string MessageWatch::look(const Note& own, bool is_sure) {
  try {
    if (is_sure) store_->set(key(rank_), own.packed());
    if (store_->check({kVerdict})) return store_->get_to_str(kVerdict);
    std::string found = is_sure && own.message ? judge(own) : "";
    if (!found.empty()) store_->set(kVerdict, found);
    return found;
  } catch (const std::exception&) {
    return "";  // without a store nobody can be told
  }
}

std::vector<int> MessageWatch::needs_of(int rank, const std::vector<Note>& notes) {
  const Note& note = notes[static_cast<size_t>(rank)];
  if (note.serial == 0) return {};
  const auto count = [](const std::map<int, uint64_t>& counts, int of) {
    const auto found = counts.find(of);
    return found == counts.end() ? 0 : found->second;
  };
  if (note.message) {
    const int peer = note.message->peer;
    const Note& theirs = notes[static_cast<size_t>(peer)];
    // What is called on both sides, or done on one, moves.
    const bool is_ahead = note.message->is_send ? count(theirs.received, rank) > count(note.sent, peer)
                                                : count(theirs.sent, rank) > count(note.received, peer);
    if (is_ahead || theirs.has({!note.message->is_send, rank, note.message->tag})) return {};
    return {peer};
  }
  std::vector<int> needs;
  for (size_t other = 0; other < notes.size(); ++other)
    if (notes[other].serial != 0 && notes[other].called < note.number) needs.push_back(static_cast<int>(other));
  return needs;
}

std::string MessageWatch::judge(const Note& own) {
  std::vector<Note> notes(static_cast<size_t>(world_size_));
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank == rank_)
      notes[static_cast<size_t>(rank)] = own;
    else if (store_->check({key(rank)}))
      notes[static_cast<size_t>(rank)] = Note::unpacked(store_->get_to_str(key(rank)));
  std::vector<Needs> needs;
  for (int rank = 0; rank < world_size_; ++rank) needs.push_back({needs_of(rank, notes)});
  const std::vector<bool> stuck = stuck_ranks(needs);
  std::vector<uint64_t> serials;
  std::string text;
  for (size_t rank = 0; rank < notes.size(); ++rank) {
    serials.push_back(stuck[rank] ? notes[rank].serial : 0);
    if (stuck[rank]) text += (text.empty() ? "" : "; ") + notes[rank].says(static_cast<int>(rank));
  }
  const auto now = Clock::now();
  if (serials != stuck_) {
    stuck_ = std::move(serials);
    stuck_since_ = now;
  }
  if (!stuck[static_cast<size_t>(rank_)] || now - stuck_since_ < kSameFor) return "";
  return "ranks wait for each other's messages: " + text + kStuckHint;
}

}  // namespace lockstep
