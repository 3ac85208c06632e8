#include "collectives/mpi/pump.h"

#include "rank_page/rank_board.h"

namespace lockstep::mpi_engine {
namespace {

constexpr const char* kFailures = "failures";  ///< on the board
constexpr std::chrono::seconds kToGiveUp{5}, kToSendNotes{1};

}  // namespace

Pump::Pump(std::unique_ptr<Port> port)
    : port_(std::move(port)),
      rank_(port_->rank()),
      world_size_(port_->world_size()),
      largest_tag_(port_->largest_tag()),
      callers_(*port_, rank_),
      messages_(*port_),
      notes_(*port_, board_, rank_, world_size_) {
  if (!port_->takes_any_thread()) return;
  mover_ = std::make_unique<Mover>([this] {
    poll();
    const MutexLock lock(mutex_);
    return messages_.is_moving();
  });
}

Pump::~Pump() {
  if (mover_) mover_->end();
  if (!callers_.may_call()) return;
  // Notes may still be in flight; no thread waits for anything else that is left.
  const Deadline deadline{std::chrono::milliseconds(kToSendNotes)};
  const auto has_notes = [&] {
    const MutexLock lock(mutex_);
    return messages_.is_sending(Notes::kTag);
  };
  poll();
  for (const auto since = Clock::now(); has_notes() && !deadline.passed(); rest(since)) poll();
  const MutexLock lock(mutex_);
  messages_.give_up();
  if (presence_ != Presence::kAllHaveLeft) return;
  if (!board_.get(kFailures))
    for (const Port::Handle communicator : opened_) port_->close(communicator);
  port_->close(port_->everybody());
}

void Pump::make(Clock::time_point since) {
  if (callers_.may_call()) {
    if (!poll()) rest(since);
    return;
  }
  MutexLock lock(mutex_);
  ++sleepers_;
  moved_.wait_for(lock.native(), std::chrono::milliseconds(1));
  --sleepers_;
}

bool Pump::poll() {
  if (!callers_.may_call()) return false;
  MutexLock lock(mutex_);
  const bool rested = !messages_.is_moving();
  const bool moved = messages_.move() || notes_.read_now_and_then();
  if (rested && messages_.is_moving() && mover_) mover_->wake();
  if (moved) own_page().beat();
  if (moved && sleepers_ > 0) moved_.notify_all();
  return moved;
}

void Pump::look_for_notes() {
  poll();
  if (!callers_.may_call()) return;
  const MutexLock lock(mutex_);
  notes_.read();
}

Port::Handle Pump::open(const std::vector<int>& ranks) {
  require("forming a group");
  const MutexLock lock(mutex_);
  opened_.push_back(port_->open(ranks));
  return opened_.back();
}

void Pump::post(const MessagePtr& message) {
  {
    const MutexLock lock(mutex_);
    messages_.post(message);
  }
  poll();
}

void Pump::give_up(const MessagePtr& message) {
  message->is_given_up = true;
  {
    const MutexLock lock(mutex_);
    if (messages_.take_back(message)) return;
  }
  // If another thread calls MPI, the memory stays in use until its next call; it waits for this one.
  const Deadline deadline{std::chrono::milliseconds(kToGiveUp)};
  for (const auto since = Clock::now(); !message->is_over() && !deadline.passed();) {
    if (port_->is_over()) return;
    make(since);
  }
}

void Pump::say_farewell(std::chrono::milliseconds timeout) noexcept {
  try {
    const auto key_of = [](int rank) { return "farewell/" + std::to_string(rank); };
    set(key_of(rank_), "1");
    {
      const MutexLock lock(mutex_);
      presence_ = Presence::kSaidFarewell;
    }
    const Deadline deadline(timeout);
    int present = 0;
    for (const auto since = Clock::now(); callers_.may_call(); make(since)) {
      look_for_notes();
      while (present < world_size_ && board_.get(key_of(present))) ++present;
      if (present == world_size_ || deadline.passed()) break;
    }
    const MutexLock lock(mutex_);
    if (present == world_size_) presence_ = Presence::kAllHaveLeft;
  } catch (const std::exception&) {
    // MPI_Finalize() frees the rest.
  }
}

void Pump::keep_communicators() { add(kFailures, 1); }

void Pump::tell_all(const std::string& note) {
  {
    const MutexLock lock(mutex_);
    if (presence_ != Presence::kPresent) return;
    for (MessagePtr& message : notes_.messages_of(note)) messages_.post(std::move(message));
  }
  poll();
}

}  // namespace lockstep::mpi_engine
