#include "collectives/mpi/pump.h"

#include <algorithm>

#include "base/error.h"
#include "rank_page/rank_board.h"

namespace lockstep::mpi_engine {
namespace {

constexpr int kNoteTag = 1;
/// Notes are rare and nobody waits for them but in trouble: so many polls without any other news look for them once.
constexpr unsigned kPollsForNotes = 16;
constexpr const char* kFailures = "failures";  ///< on the board
constexpr std::chrono::seconds kToGiveUp{5}, kToSendNotes{1}, kToReadNote{1};
/// Between two polls of the pump's own thread, which matter only where nobody who waits polls more often.
constexpr std::chrono::milliseconds kToKeepMoving{1};

/// A thread that waits yields at first, because the rank that it waits for may need the core, and then sleeps, longer
/// the longer it has waited.
void rest(Clock::time_point since) {
  constexpr std::chrono::microseconds kYield{500}, kShortest{50}, kLongest{1000};
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since);
  if (waited < kYield) return std::this_thread::yield();
  std::this_thread::sleep_for(std::clamp(waited / 16, kShortest, kLongest));
}

}  // namespace

Pump::Pump(std::unique_ptr<Port> port)
    : port_(std::move(port)),
      rank_(port_->rank()),
      world_size_(port_->world_size()),
      largest_tag_(port_->largest_tag()) {
  if (port_->takes_any_thread()) mover_ = std::thread([this] { keep_moving(); });
}

Pump::~Pump() {
  if (fork_generation_ != fork_generation()) {  // MPI and the thread belong to the process that forked
    if (mover_.joinable()) mover_.detach();
    return;
  }
  if (mover_.joinable()) {
    {
      const MutexLock lock(mutex_);
      ending_ = true;
    }
    started_.notify_one();
    mover_.join();
  }
  if (!may()) return;
  // Notes may still be on their way; of what else is left nobody waits for anything.
  const Deadline deadline{std::chrono::milliseconds(kToSendNotes)};
  const auto is_note = [](const MessagePtr& message) { return message->is_sent && message->tag == kNoteTag; };
  const auto has_notes = [&] {
    const MutexLock lock(mutex_);
    return std::any_of(moving_.begin(), moving_.end(), is_note);
  };
  poll();
  for (const auto since = Clock::now(); has_notes() && !deadline.passed(); rest(since)) poll();
  const MutexLock lock(mutex_);
  for (const MessagePtr& message : moving_) {
    message->is_given_up = true;
    advance(*message);
  }
  if (!all_have_left_) return;
  if (!board_.get(kFailures))
    for (const Port::Handle communicator : opened_) port_->close(communicator);
  port_->close(port_->everybody());
}

bool Pump::may() const {
  return fork_generation_ == fork_generation() && !port_->is_over() &&
         (port_->takes_any_thread() || std::this_thread::get_id() == owner_);
}

void Pump::require(const char* operation) const {
  if (may()) return;
  if (port_->is_over())
    throw Error(std::string(operation) + " on rank " + std::to_string(rank_) +
                ": MPI has been finalized; let the Context's scope end before MPI_Finalize()");
  throw Error(std::string(operation) + " on rank " + std::to_string(rank_) + " was called by a thread that must not " +
              "call MPI: the program asked MPI for " + port_->thread_level() +
              ", so only the thread that made the Context may communicate. Call it there, or initialize MPI by "
              "MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...)");
}

void Pump::make(Clock::time_point since) {
  if (may()) {
    if (!poll()) rest(since);
    return;
  }
  MutexLock lock(mutex_);
  ++sleepers_;
  moved_.wait_for(lock.native(), std::chrono::milliseconds(1));
  --sleepers_;
}

bool Pump::poll() {
  if (!may()) return false;
  MutexLock lock(mutex_);
  const bool rested = moving_.empty();
  bool moved = !posted_.empty();
  for (const MessagePtr& message : posted_) {
    start(*message);
    if (!message->is_over()) moving_.push_back(message);
  }
  posted_.clear();
  if (std::erase_if(moving_,
                    [this](const MessagePtr& message) LOCKSTEP_REQUIRES(mutex_) { return advance(*message); }) > 0)
    moved = true;
  if (!moved && ++polls_ % kPollsForNotes == 0) moved = read_notes();
  if (rested && !moving_.empty() && mover_.joinable()) started_.notify_one();
  if (moved) own_page().beat();
  if (moved && sleepers_ > 0) moved_.notify_all();
  return moved;
}

void Pump::keep_moving() {
  MutexLock lock(mutex_);
  while (!ending_) {
    if (moving_.empty()) {
      started_.wait(lock.native());
      continue;
    }
    started_.wait_for(lock.native(), kToKeepMoving);
    lock.unlock();
    poll();
    lock.lock();
  }
}

void Pump::look_for_notes() {
  poll();
  if (!may()) return;
  const MutexLock lock(mutex_);
  read_notes();
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
    posted_.push_back(message);
  }
  poll();
}

void Pump::give_up(const MessagePtr& message) {
  message->is_given_up = true;
  {
    const MutexLock lock(mutex_);
    if (std::erase(posted_, message) > 0) return end(*message, "given up");
  }
  // Where another thread calls MPI, the memory stays in use until it does so the next time; it waits for this one.
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
      said_farewell_ = true;
    }
    const Deadline deadline(timeout);
    int present = 0;
    for (const auto since = Clock::now(); may(); make(since)) {
      look_for_notes();
      while (present < world_size_ && board_.get(key_of(present))) ++present;
      if (present == world_size_ || deadline.passed()) break;
    }
    const MutexLock lock(mutex_);
    all_have_left_ = present == world_size_;
  } catch (const std::exception&) {
    // What is not freed is MPI's to free in MPI_Finalize().
  }
}

void Pump::keep_communicators() { add(kFailures, 1); }

void Pump::tell_all(const std::string& note) {
  {
    const MutexLock lock(mutex_);
    if (said_farewell_) return;
  }
  const auto kept = std::make_shared<std::string>(note);
  for (int i = 1; i < world_size_; ++i) {
    auto message = std::make_shared<Message>();
    message->communicator = port_->everybody();
    message->data = kept->data();
    message->bytes = kept->size();
    message->peer = (rank_ + i) % world_size_;
    message->tag = kNoteTag;
    message->is_sent = true;
    message->keep = kept;
    const MutexLock lock(mutex_);
    posted_.push_back(std::move(message));
  }
  poll();
}

void Pump::end(Message& message, const std::string& error) {
  message.error = error;
  message.keep = nullptr;
  message.state.store(error.empty() ? Message::State::kArrived : Message::State::kFailed, std::memory_order_release);
}

void Pump::start(Message& message) {
  try {
    message.handle = message.is_sent
                         ? port_->send(message.communicator, message.data, message.bytes, message.peer, message.tag)
                         : port_->receive(message.communicator, message.data, message.bytes, message.peer, message.tag);
    message.state = Message::State::kMoving;
  } catch (const std::exception& failure) {
    end(message, failure.what());
  }
}

bool Pump::advance(Message& message) {
  try {
    if (port_->test(message.handle)) {
      end(message, "");
    } else if (message.is_given_up) {
      port_->give_up(message.handle, message.is_sent);
      end(message, "given up");
    }
  } catch (const std::exception& failure) {
    end(message, failure.what());
  }
  return message.is_over();
}

bool Pump::read_notes() {
  bool any = false;
  try {
    while (const auto arrival = port_->arrival(port_->everybody(), kNoteTag)) {
      std::string note(arrival->bytes, '\0');
      Port::Handle handle = port_->receive(port_->everybody(), note.data(), note.size(), arrival->from, kNoteTag);
      const Deadline deadline{std::chrono::milliseconds(kToReadNote)};  // all of it is here, or nearly
      const auto since = Clock::now();
      bool whole = port_->test(handle);
      for (; !whole && !deadline.passed(); whole = port_->test(handle)) rest(since);
      if (!whole) {
        port_->give_up(handle, /*is_sent=*/false);
        return any;
      }
      board_.apply(note);
      any = true;
    }
  } catch (const std::exception&) {
    // A connection has failed; who waits for a message over it is told.
  }
  return any;
}

}  // namespace lockstep::mpi_engine
