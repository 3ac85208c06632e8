#include "collectives/message_watch.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <lockstep/error.h>

#include "base/library_thread.h"
#include "base/thread_token.h"
#include "collectives/typed_message.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

/// A rank that is merely late has nearly always arrived by the first look.
constexpr milliseconds kFirstLook{400}, kLongestPause{1500};
constexpr int kRestsBeforeDozing = 5;

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
      watch_->dropped_.keep({.work = inner_, .waiter = waiter_, .place = place_});
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
    } catch (const std::exception&) {
      has_failed_ = true;
      watch_->end_wait();
      require_no_verdict();
      const std::string left = watch_->board_.departure(message_);
      if (!left.empty()) throw Error(left);
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
  std::list<Message>::iterator place_;     ///< among the pending ones, until it is done
  std::shared_ptr<MessageWaiter> waiter_;  ///< since is_completed() was called
  bool is_done_ = false, has_failed_ = false;
};

MessageWatch::MessageWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                           std::function<void(const std::string&)> tell)
    : tell_(std::move(tell)),
      board_(std::move(store), rank, world_size),
      deadlock_(rank),
      dropped_({.over = [this](const DroppedMessages::One& one, bool is_there) { note_over(one.place, is_there); },
                .refused = [this](const std::string& text) { declare(text); }}) {}

void MessageWatch::stop() {
  const bool is_forked = fork_generation_ != fork_generation();  // the threads belong to the process that forked
  if (is_forked) {
    if (thread_.joinable()) thread_.detach();
    return dropped_.stop(is_forked);
  }
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    if (!std::exchange(ending_, true)) board_.leave(done_.pending);
    thread.swap(thread_);
  }
  changed_.notify_all();
  if (thread.joinable()) thread.join();
  dropped_.stop(is_forked);
}

void MessageWatch::note_over(std::list<Message>::iterator place, bool is_there) {
  const MutexLock lock(mutex_);
  if (is_there)
    note_done(place);
  else
    done_.pending.erase(place);
}

void MessageWatch::note_done(std::list<Message>::iterator place) {
  ++(place->is_send ? done_.sent : done_.received)[place->peer];
  done_.pending.erase(place);
}

void MessageWatch::expect_several_callers() {
  const MutexLock lock(mutex_);
  callers_.are_several = true;
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
  board_.declare(text);
  const MutexLock lock(mutex_);
  if (verdict_.empty()) verdict_ = text;
}

void MessageWatch::interrupt(const std::string& why) {
  const MutexLock lock(mutex_);
  if (verdict_.empty()) verdict_ = why;
  if (wait_ && wait_->work != nullptr) wait_->work->abort();
}

void MessageWatch::note_caller() {
  callers_.note(thread_token());
  if (callers_.are_several && wait_ && wait_->is_told) changed_.notify_all();
}

void MessageWatch::begin_wait(Wait wait) {
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    note_caller();
    if (wait_) callers_.are_several = true;
    wait.serial = ++done_.serial;
    wait.pause = kFirstLook;
    wait.next_look = coarse_now() + kFirstLook;
    wait.is_told = wait_ && wait_->is_told;
    if (wait.message != nullptr) start_thread_locked();
    wait_ = wait;
    wake = thread_state_ == ThreadState::kDozing;
  }
  if (wake) changed_.notify_all();
}

void MessageWatch::end_wait() {
  MutexLock lock(mutex_);
  while (thread_state_ == ThreadState::kLooking) changed_.wait(lock.native());
  const bool is_told = wait_ && wait_->is_told;
  wait_.reset();
  if (!is_told) return;
  lock.unlock();
  board_.take_back();  // before anything else is called: others rely on it
}

void MessageWatch::start_thread() {
  const MutexLock lock(mutex_);
  start_thread_locked();
}

void MessageWatch::start_thread_locked() {
  if (!thread_.joinable() && !ending_) thread_ = library_thread([this] { run(); });
}

void MessageWatch::run() {
  MutexLock lock(mutex_);
  for (int rests = 0; !ending_;) {
    const auto now = Clock::now();
    if (callers_.are_several && wait_ && std::exchange(wait_->is_told, false)) {
      lock.unlock();
      board_.take_back();
      lock.lock();
    }
    if (!wait_) {
      if (++rests > kRestsBeforeDozing) {
        thread_state_ = ThreadState::kDozing;
        changed_.wait(lock.native());
        thread_state_ = ThreadState::kAwake;
      } else {
        changed_.wait_for(lock.native(), kFirstLook);
      }
      continue;
    }
    rests = 0;
    if (now < wait_->next_look) {
      changed_.wait_for(lock.native(), std::min<Clock::duration>(kFirstLook, wait_->next_look - now));
      continue;
    }
    const Note own = own_note();
    const bool is_sure = !callers_.are_several;
    thread_state_ = ThreadState::kLooking;
    wait_->is_told = wait_->is_told || is_sure;
    lock.unlock();
    const std::string found = look(own, is_sure);
    if (!found.empty() && tell_) tell_(found);
    lock.lock();
    thread_state_ = ThreadState::kAwake;
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
    if (is_sure) board_.tell(own);
    if (std::string known = board_.verdict(); !known.empty()) return known;
    std::string found = is_sure && own.message ? deadlock_.judge(board_.read(own)) : "";
    if (!found.empty()) board_.declare(found);
    return found;
  } catch (const std::exception&) {
    return "";  // without a store no rank can be told
  }
}

}  // namespace lockstep
