#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>

namespace lockstep {

/// A message between this rank and another.
struct NotedMessage {
  bool is_send = false;
  int peer = 0;
  int tag = 0;
  bool operator==(const NotedMessage&) const = default;
};

/// A waiting rank's announcement to the others (MessageWatch).
struct ToldWait {
  uint64_t serial = 0;  ///< 0: it is not waiting
  std::optional<NotedMessage> message;
  uint64_t number = 0;  ///< of the collective that it waits for
  uint64_t called = 0;  ///< collectives
  std::string text;     ///< of the collective
  std::list<NotedMessage> pending;
  std::map<int, uint64_t> sent, received;  ///< messages that are done, by peer

  std::string packed() const;
  static ToldWait unpacked(const std::string& bytes);
  bool has(const NotedMessage& wanted) const;
  std::string says(int rank) const;
};

}  // namespace lockstep
