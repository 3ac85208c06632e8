#include "collectives/mpi/notes.h"

namespace lockstep::mpi_engine {
namespace {

/// Notes are rare, and waited for only after failures, so they are checked once in this many polls without other
/// events.
constexpr unsigned kPollsForNotes = 16;
constexpr std::chrono::seconds kToReadNote{1};

}  // namespace

std::vector<MessagePtr> Notes::messages_of(const std::string& note) const {
  const auto kept = std::make_shared<std::string>(note);
  std::vector<MessagePtr> messages;
  for (int i = 1; i < world_size_; ++i) {
    auto message = std::make_shared<Message>();
    message->communicator = port_.everybody();
    message->data = kept->data();
    message->bytes = kept->size();
    message->peer = (rank_ + i) % world_size_;
    message->tag = kTag;
    message->is_sent = true;
    message->keep = kept;
    messages.push_back(std::move(message));
  }
  return messages;
}

bool Notes::read_now_and_then() { return ++polls_ % kPollsForNotes == 0 && read(); }

bool Notes::read() {
  bool any = false;
  try {
    while (const auto arrival = port_.arrival(port_.everybody(), kTag)) {
      std::string note(arrival->bytes, '\0');
      Port::Handle handle = port_.receive(port_.everybody(), note.data(), note.size(), arrival->from, kTag);
      const Deadline deadline{std::chrono::milliseconds(kToReadNote)};  // the whole note has arrived, or nearly
      const auto since = Clock::now();
      bool whole = port_.test(handle);
      for (; !whole && !deadline.passed(); whole = port_.test(handle)) rest(since);
      if (!whole) {
        port_.give_up(handle, /*is_sent=*/false);
        return any;
      }
      board_.apply(note);
      any = true;
    }
  } catch (const std::exception&) {
    // A connection has failed; threads that wait for a message over it get the error.
  }
  return any;
}

}  // namespace lockstep::mpi_engine
