#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hosts/addresses.h"
#include "hosts/channel.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {

/// The door at which agents connect. A connection costs a descriptor until it sends something, and then a TLS handshake
/// until it has proved the key or its time is over. The number of connections, besides those of awaited agents, is
/// limited, and a new one replaces the one that has taken longest. So strangers can neither fill the memory nor keep
/// out agents, which try again. While no agent is awaited, strangers get a tenth of the time, so that they hardly delay
/// the run's messages.
class Door {
 public:
  static constexpr size_t kMostWaiting = 64;
  static constexpr std::chrono::milliseconds kHandshakeTime{3000};

  explicit Door(const Tls& tls) : tls_(tls) {}

  /// Opens the door on a port (0: any) of these numeric addresses. Throws LaunchError.
  void open(const std::vector<std::string>& addresses, int port);
  void close();
  /// Sets the number of awaited agents, which may all connect at once.
  void expect(size_t agents) { expected_ = agents; }
  bool is_open() const { return !listeners_.empty(); }
  std::vector<Endpoint> endpoints() const;

  void watch(PollSet& polled);
  std::optional<Clock::time_point> due() const;
  /// Closes connections that have taken too long.
  void tick(Clock::time_point now);
  /// Channels that have proved the key since the last call.
  std::vector<std::unique_ptr<Channel>> take_admitted() { return std::exchange(admitted_, {}); }

  uint64_t turned_away() const { return turned_away_; }
  const std::string& last_stranger() const { return last_stranger_; }

 private:
  struct Waiting {
    FileDescriptor socket;  ///< until it sends something
    std::unique_ptr<Channel> channel;
    Clock::time_point since;
    std::string from;
    bool over = false;
  };

  bool is_resting() const { return expected_ == 0 && Clock::now() < resting_until_; }
  void accept_from(int listener);
  void serve(Waiting& one);
  void turn_away(Waiting& one);

  const Tls& tls_;
  std::vector<Listener> listeners_;
  std::list<Waiting> waiting_;  // oldest first
  std::vector<std::unique_ptr<Channel>> admitted_;
  size_t expected_ = 0;
  int served_ = 0;           // in this turn
  Clock::duration spent_{};  // in this turn
  Clock::time_point resting_until_{};
  uint64_t turned_away_ = 0;
  std::string last_stranger_;
};

}  // namespace lockstep::hosts
