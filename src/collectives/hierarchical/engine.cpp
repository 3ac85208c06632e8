#include "collectives/hierarchical/engine.h"

#include "base/error.h"
#include "base/interruption.h"
#include "collectives/cause.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "collectives/gloo/flight_recorder.h"
#include "collectives/split_table.h"
#include "collectives/timeout_hint.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

namespace lockstep::hierarchical_engine {
namespace {

/// How long a rank whose operation has failed waits for the others to report their positions.
constexpr std::chrono::milliseconds kPatience{600};
constexpr const char* kInterrupted = "it was interrupted (SIGINT, Ctrl-C) while it waited for other ranks";

}  // namespace

Engine::Engine(const Layout& layout, c10::intrusive_ptr<shm_engine::ShmBackend> shared,
               std::shared_ptr<Carrier> between, const c10::intrusive_ptr<c10d::Store>& store,
               std::chrono::milliseconds timeout)
    : equipment_{.layout = layout,
                 .order = SumOrder::over(layout),
                 .machine = Machine(equipment_.layout, std::move(shared)),
                 .links = Links(std::move(between)),
                 .travelling = {},
                 .adding = {},
                 .splits = {}},
      timeout_(timeout),
      recorder_(std::make_shared<gloo_engine::FlightRecorder>(store, layout.rank, layout.world_size())),
      messages_(std::make_shared<MessageWatch>(store, layout.rank, layout.world_size(),
                                               [this](const std::string& text) { end_stuck(text); })),
      runner_([this] { watch(); }, [this] { equipment_.links.ask(); }, progress(),
              /*waiters_run=*/this->shared() == nullptr || may_wait_in_memory()) {
  gloo_engine::leave_word_at_exit(recorder_);
}

Engine::~Engine() {
  leave_word();
  messages_->stop();
  // Operations that still run must not wait for other ranks.
  if (shared() != nullptr) shared()->shutdown();
  equipment_.links.interrupt();
}

JobPtr Engine::start(shm::Request request, std::chrono::milliseconds timeout, bool at_once, std::function<void()> then,
                     std::function<void(const std::exception_ptr&)> at_end) {
  require(shm::name(request.kind));
  const MutexLock lock(mutex_);
  if (request.kind == shm::OperationKind::kAllToAllUneven) request.count = 0;
  const gloo_engine::Entry entry = recorder_->add(shm::call_of(request).text());
  messages_->note_collective();
  auto job = std::make_shared<Job>();
  job->number = entry.number;
  job->text = entry.text;
  job->run = [this, request = std::move(request), timeout, entry, tag = recorder_->tag(), then = std::move(then)] {
    carry_out(request, timeout, entry, tag);
    if (then) then();
  };
  job->at_end = std::move(at_end);
  runner_.add(job, at_once);
  return job;
}

void Engine::wait(const JobPtr& job) {
  const gloo_engine::BlockedSigpipe blocked;
  wait_until(job, nullptr);
  rethrow_error_of(job);
}

bool Engine::wait_until(const JobPtr& job, const Deadline* deadline) {
  const MessageWatch::CollectiveWait waiting(*messages_, job->number, job->text);
  try {
    return runner_.wait(job, deadline);
  } catch (const Interruption&) {
    is_told_ = true;
    this->abort(kInterrupted);
    throw;
  }
}

void Engine::rethrow_error_of(const JobPtr& job) {
  if (!job->error) return;
  is_told_ = true;
  std::exception_ptr interruption;
  {
    const MutexLock lock(mutex_);
    interruption = std::exchange(interruption_, nullptr);
  }
  std::rethrow_exception(interruption ? interruption : job->error);
}

std::string Engine::finish(const Deadline& deadline) {
  if (is_told_) return "";
  const JobPtr unfinished = runner_.finish(deadline);
  if (unfinished)
    return "operation " + std::to_string(unfinished->number) + ", " + unfinished->text +
           ", is not done: not all ranks have called it";
  const MutexLock lock(mutex_);
  return failure_;
}

void Engine::leave_word() {
  // In a child of fork(), the mutex may be held by a thread that is not there.
  if (generation_ != fork_generation()) return;
  const uint64_t unfinished = runner_.first_number();
  const MutexLock lock(mutex_);
  recorder_->leave_word(unfinished);
}

void Engine::leave() {
  leave_word();
  if (shared() != nullptr) shared()->shutdown();
  equipment_.links.carrier().leave();
}

void Engine::interrupt(const std::string& why) {
  {
    const MutexLock lock(ended_mutex_);
    ended_because_ = why;
  }
  messages_->interrupt(why);
  this->abort(why);
}

void Engine::abort(const std::string& why) {
  if (shared() != nullptr) shared()->core().abort(why);
  equipment_.links.interrupt();
}

void Engine::carry_out(const shm::Request& request, std::chrono::milliseconds timeout, const gloo_engine::Entry& entry,
                       uint32_t tag) {
  {
    const MutexLock lock(mutex_);
    if (!failure_.empty()) throw Error("an earlier operation ended the group: " + failure_);
    watched_ = &entry;
  }
  const OperationLabel label(entry.purpose);  // for the ranks of this machine
  const auto started = Clock::now();
  std::string cause;
  bool is_late = false;  // and no rank has reported it yet
  std::exception_ptr interruption;
  try {
    Operation(equipment_, request, tag, timeout).run();
  } catch (const BrokenLink& broken) {
    cause = broken.what();
    is_late = Clock::now() - started >= timeout;
  } catch (const RanksDiffer& difference) {
    cause = difference.what();
    const MutexLock lock(mutex_);
    if (mismatch_.empty()) mismatch_ = cause;
  } catch (const Disagreement&) {
    cause = "ranks of this machine called different operations";
  } catch (const Interruption&) {
    cause = kInterrupted;
    interruption = std::current_exception();
  } catch (const std::exception& exception) {
    cause = cause_of(exception);
  }
  const MutexLock lock(mutex_);
  watched_ = nullptr;
  if (cause.empty()) return;
  interruption_ = interruption;
  failure_ = explain(cause, entry, is_late);
  throw Error(failure_);
}

std::string Engine::explain(const std::string& cause, const gloo_engine::Entry& entry, bool is_late) {
  const Layout& layout = equipment_.layout;
  equipment_.links.carrier().break_off(layout.on_rail(layout.here() == 0 ? 1 : 0, layout.local()));
  std::string text = mismatch_;
  if (text.empty()) {
    text = interruption_ ? cause : recorder_->explain(cause, entry, kPatience);
    if (is_late) text += timeout_hint;
    // A rank that ends a group on all ranks may have reached first another rank, which has left.
    const MutexLock lock(ended_mutex_);
    if (!ended_because_.empty() && !interruption_) text = ended_because_;
  }
  // Before the core is told, which would count it as this rank's own failure.
  own_page().fail(is_late ? RankFailure::kMissing : RankFailure::kPeer, -1, text);
  if (shared() != nullptr) shared()->core().abort(mismatch_.empty() ? cause : mismatch_);
  return text;
}

void Engine::end_stuck(const std::string& text) {
  {
    const MutexLock lock(mutex_);
    if (mismatch_.empty()) mismatch_ = text;
  }
  this->abort(text);
}

void Engine::watch() {
  messages_->start_thread();
  WaitOnPage::show_any();  // the thread that runs the operation may wait for a message all the time
  // A thread that explains a failure holds the mutex, and may need this thread to move its messages.
  if (!mutex_.try_lock()) return;
  if (watched_ != nullptr && mismatch_.empty()) {
    mismatch_ = recorder_->compare(*watched_);
    if (!mismatch_.empty()) equipment_.links.interrupt();
  }
  mutex_.unlock();
}

}  // namespace lockstep::hierarchical_engine
