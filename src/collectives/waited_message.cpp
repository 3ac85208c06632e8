#include "collectives/waited_message.h"

#include <atomic>

#include "base/mutex.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

struct Waited {
  Mutex mutex;  ///< held while it is read, and while it is destroyed
  std::atomic<const WaitedMessage*> message{nullptr};
};

/// Never destroyed: a thread may ask while the process ends.
Waited& waited() {
  static auto* const kWaited = new Waited;
  return *kWaited;
}

}  // namespace

WaitedMessage::WaitedMessage(const Group::State& group, const MessageCounts::Message& message)
    : group_(group), message_(message), label_(OperationLabel::current()) {
  waited().message.store(this, std::memory_order_release);  // to now(): the words above are in place
}

WaitedMessage::~WaitedMessage() {
  const MutexLock lock(waited().mutex);
  const WaitedMessage* self = this;
  waited().message.compare_exchange_strong(self, nullptr);
}

WaitedMessage::Seen WaitedMessage::seen() const {
  const std::string& engine = group_.backend_name;
  return {.group = group_.on_page.id(),
          .needs = group_.on_page.bit(message_.peer),
          .message = message_,
          .needs_receive = engine == "gloo" || engine == "mpi",
          .label = std::string(label_)};
}

std::optional<WaitedMessage::Seen> WaitedMessage::now() {
  const MutexLock lock(waited().mutex);
  const WaitedMessage* const message = waited().message.load(std::memory_order_acquire);  // from the constructor
  return message == nullptr ? std::nullopt : std::optional(message->seen());
}

}  // namespace lockstep
