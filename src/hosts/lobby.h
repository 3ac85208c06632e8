#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hosts/door.h"

namespace lockstep::hosts {

/// An agent that has proved the key and identified itself.
struct Arrival {
  Hello hello;
  std::unique_ptr<Channel> channel;
};

/// The door, and the agents that have passed it but not identified themselves yet. Passive, like a Team.
class Lobby {
 public:
  explicit Lobby(const Tls& tls) : door_(tls) {}

  Door& door() { return door_; }
  void watch(PollSet& polled);
  std::optional<Clock::time_point> due() const { return door_.due(); }
  void tick();
  std::vector<Arrival> take_arrivals() { return std::exchange(arrivals_, {}); }
  /// Messages to the user about strangers; usually empty.
  std::string take_news();

  /// Tells an agent that it is refused, and why.
  static void send_away(Channel& channel, int exit_code, const std::string& why);

 private:
  Door door_;
  std::deque<std::unique_ptr<Channel>> silent_;
  std::vector<Arrival> arrivals_;
  uint64_t told_from_ = 1;  // the number of strangers at which the user is told next
};

}  // namespace lockstep::hosts
