#include "collectives/gloo/watched_work.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/error.h>

#include "collectives/cause.h"
#include "collectives/split_table.h"
#include "rank_page/wait_on_page.h"

namespace lockstep::gloo_engine {

void leak(c10::intrusive_ptr<c10d::Backend> engine) {
  static auto* const left = new std::vector<c10::intrusive_ptr<c10d::Backend>>;
  left->push_back(std::move(engine));
}

bool WatchedWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() != 0) return inner_->wait(timeout);
  try {
    const bool is_done = wait_watched();
    pending_->forget(entry_.number);
    return is_done;
  } catch (...) {
    pending_->forget(entry_.number);
    throw;
  }
}

bool WatchedWork::wait_watched() {
  // It may succeed all the same, but not on every rank: an interrupt ends the group, as in shared memory.
  if (const std::string why = recorder_->interruption(); !why.empty()) {
    leak(engine_);
    throw Error(why);
  }
  const auto started = Clock::now();
  std::optional<MessageWatch::CollectiveWait> waiting;
  if (!inner_->isCompleted()) waiting.emplace(*messages_, entry_.number, entry_.text);
  // Nearly every rank that is merely late has arrived by the first check.
  auto pause = kFirstCheck;
  for (auto next = started + pause; !is_done_within(kFirstCheck, started);) {
    WaitOnPage::show_again();
    messages_->start_thread();
    std::string mismatch = messages_->verdict();
    if (mismatch.empty()) mismatch = recorder_->interruption();
    if (mismatch.empty() && Clock::now() >= next) {
      mismatch = recorder_->compare(entry_);
      pause = std::min(pause * 3 / 2, kLongestPause);
      next = Clock::now() + pause;
    }
    if (mismatch.empty()) continue;
    leak(engine_);
    throw Error(mismatch);
  }
  return true;
}

bool WatchedWork::is_done_within(std::chrono::milliseconds pause, Clock::time_point started) {
  try {
    return inner_->wait(pause);
  } catch (const RanksDiffer&) {
    throw;  // on every rank, with one text
  } catch (const std::exception& cause) {
    if (!inner_->isCompleted()) return false;  // only the pause is over
    if (inner_->isSuccess()) return inner_->wait();
    const auto timeout = std::clamp(std::chrono::milliseconds(static_cast<int64_t>(seconds_since(started) * 500)),
                                    std::chrono::milliseconds(250), std::chrono::milliseconds(2000));
    std::string text = recorder_->interruption();
    if (text.empty()) text = recorder_->explain(cause_of(cause), entry_, timeout);
    // A rank that ends a group on all ranks may have reached first another rank, which has left.
    if (const std::string why = recorder_->interruption(); !why.empty()) text = why;
    throw Error(text);
  }
}

}  // namespace lockstep::gloo_engine
