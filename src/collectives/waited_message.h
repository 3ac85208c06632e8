#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/group.h>

#include "collectives/message_counts.h"

namespace lockstep {

/// While it lives, shows for which message this process waits. If several threads wait, the last one counts. Waits for
/// collectives are shown on the rank's page.
class WaitedMessage {
 public:
  struct Seen {
    uint64_t group = 0;  ///< RankStatus::Group::id; 0: unknown
    uint64_t needs = 0;  ///< the peer, as RankStatus::Awaited::needs
    MessageCounts::Message message;
    /// The engine sends a message only to a rank that has called the receive. Other engines may store it until then, as
    /// soon as there is room.
    bool needs_receive = false;
    std::string label;  ///< OperationLabel of the waiting thread
  };

  /// REQUIRES: both arguments outlive the object.
  WaitedMessage(const Group::State& group, const MessageCounts::Message& message);
  ~WaitedMessage();
  WaitedMessage(const WaitedMessage&) = delete;
  WaitedMessage& operator=(const WaitedMessage&) = delete;

  /// Any thread may call.
  static std::optional<Seen> now();

 private:
  Seen seen() const;

  const Group::State& group_;
  const MessageCounts::Message& message_;
  const std::string_view label_;
};

}  // namespace lockstep
