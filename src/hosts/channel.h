#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "hosts/messages.h"
#include "hosts/tls.h"
#include "hosts/wire.h"

namespace lockstep::hosts {

/// The interval at which each side of a channel sends a beat, and the silence after which the other side counts as
/// lost.
constexpr std::chrono::seconds kBeatEvery{1};
constexpr std::chrono::milliseconds kSilence{4000};

/// One authenticated connection between the coordinator and an agent. Never waits, and never throws because of the
/// other side: its owner polls fd() for events(), calls act(), and takes the messages. Used by one thread.
class Channel {
 public:
  enum class State { kHandshake, kOpen, kClosed };

  Channel(FileDescriptor socket, const Tls& tls);

  State state() const { return state_; }
  bool is_open() const { return state_ == State::kOpen; }
  int fd() const { return socket_.get(); }
  short events() const;
  /// Continues the handshake, receives available bytes, and sends as much as the socket accepts.
  void act();
  /// Queues a message and sends as much as the socket accepts.
  template <typename Message>
  void send(Kind kind, const Message& message) {
    send_body(kind, encode(message));
  }
  void send(Kind kind) { send_body(kind, {}); }
  /// As above, of a kind that this file does not know.
  void send_bytes(uint8_t kind, std::string_view body) { send_body(static_cast<Kind>(kind), body); }
  /// Sends a beat if one is due.
  void beat(Clock::time_point now);
  Clock::time_point next_beat() const { return next_beat_; }

  struct Message {
    Kind kind;
    std::string_view body;  ///< valid until the next call
  };
  /// The next message that has arrived completely. A message longer than `limit` closes the channel.
  std::optional<Message> next(size_t limit);

  void close(const std::string& why);
  /// The reason why it is closed.
  const std::string& reason() const { return reason_; }
  /// Whether the other side has refused our key, or this side the other's.
  bool key_was_refused() const { return key_refused_; }
  Clock::time_point last_heard() const { return last_heard_; }
  /// Called when this process was stopped meanwhile: the other side's messages may still arrive.
  void forgive(Clock::time_point now) { last_heard_ = now; }
  /// Bytes that the socket has not accepted yet.
  size_t queued() const { return outbox_.size() - sent_; }
  /// Bytes that have come and that next() has not returned: of a message that is still coming, after it returned none.
  size_t received() const { return inbox_.size() - read_; }
  struct Addresses {
    std::string here, there;
  };
  /// Numeric addresses of both ends.
  Addresses addresses() const;

 private:
  void send_body(Kind kind, std::string_view body);
  void shake_hands();
  void receive();
  void flush();
  /// Called after a call that did not succeed. Returns false if the connection is over.
  bool goes_on(int result);

  FileDescriptor socket_;
  const Side side_;
  Tls::Session tls_;
  State state_ = State::kHandshake;
  std::string reason_;
  bool key_refused_ = false;
  bool wants_write_ = false;
  std::string inbox_, outbox_;
  size_t read_ = 0, sent_ = 0;  // bytes of these consumed
  size_t sent_by_key_ = 0;
  Clock::time_point last_heard_ = Clock::now();
  Clock::time_point next_beat_ = Clock::now() + kBeatEvery;
};

}  // namespace lockstep::hosts
