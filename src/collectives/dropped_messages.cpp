#include "collectives/dropped_messages.h"

#include <chrono>
#include <exception>
#include <utility>

#include "base/library_thread.h"
#include "collectives/typed_message.h"

namespace lockstep {

void DroppedMessages::keep(One message) {
  const MutexLock lock(mutex_);
  messages_.push_back(std::move(message));
  if (!thread_.joinable()) thread_ = library_thread([this] { run(); });
  changed_.notify_all();
}

void DroppedMessages::stop(bool is_forked) {
  if (is_forked) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::thread thread;
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    thread.swap(thread_);
    if (!messages_.empty()) messages_.front().work->abort();
  }
  changed_.notify_all();
  if (thread.joinable()) thread.join();
  messages_.clear();
}

void DroppedMessages::run() {
  MutexLock lock(mutex_);
  while (!ending_) {
    if (messages_.empty()) {
      changed_.wait(lock.native());
      continue;
    }
    const One& first = messages_.front();
    lock.unlock();
    bool is_there = false;
    try {
      // A shorter timeout would end the group, though nobody waits for the message.
      is_there = first.waiter ? first.waiter->wait(std::chrono::milliseconds(0)) : first.work->wait(kLongestTimeout);
    } catch (const WrongMessage& wrong) {
      tell_.refused(wrong.what());
    } catch (const std::exception&) {  // the group has ended, which others report
    }
    tell_.over(first, is_there);
    lock.lock();
    std::list<One> done;
    done.splice(done.begin(), messages_, messages_.begin());
    lock.unlock();
    done.clear();
    lock.lock();
  }
}

}  // namespace lockstep
