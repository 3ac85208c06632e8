#include "hosts/lobby.h"

#include <gtest/gtest.h>

#include <iostream>

// Many agents with the key come at once.

namespace lockstep::hosts {
namespace {

/// Seconds from the first connection until the coordinator has the greetings of all. Both sides are in this thread.
double rendezvous(size_t agents) {
  const Key key = Key::generate();
  const Tls inside(key, Side::kCoordinator), outside(key, Side::kAgent);
  Lobby lobby(inside);
  lobby.door().open({"127.0.0.1"}, 0);
  lobby.door().expect(agents);
  const Endpoint endpoint = lobby.door().endpoints().front();
  std::deque<std::unique_ptr<Channel>> silent, greeted;
  std::vector<Arrival> arrived;
  PollSet polled;
  size_t started = 0;
  const auto began = Clock::now();
  for (const Deadline deadline{std::chrono::seconds(60)}; arrived.size() < agents && !deadline.passed();) {
    for (int i = 0; i < 32 && started < agents; ++i, ++started) {
      std::string why;
      silent.push_back(std::make_unique<Channel>(connect_to(endpoint, deadline, why), outside));
      EXPECT_EQ(why, "");
    }
    polled.clear();
    lobby.watch(polled);
    for (const auto& one : silent)
      polled.add(one->fd(), one->events(), [agent = one.get()](const pollfd&) { agent->act(); });
    polled.wait(started < agents ? 0 : 100);
    for (auto& one : silent) {
      if (one->state() == Channel::State::kHandshake) {
        one->act();
        continue;
      }
      one->send(Kind::kHello, Hello{.version = "1", .node = static_cast<int>(greeted.size()), .host = "here"});
      greeted.push_back(std::move(one));
    }
    std::erase(silent, nullptr);
    lobby.tick();
    for (Arrival& one : lobby.take_arrivals()) arrived.push_back(std::move(one));
  }
  EXPECT_EQ(arrived.size(), agents);
  EXPECT_EQ(lobby.door().turned_away(), 0u);
  return seconds_since(began);
}

TEST(Lobby, AHundredAgentsComeAtOnce) { EXPECT_LT(rendezvous(100), 10); }

TEST(HostsHostile, AThousandAgentsComeAtOnce) {
  for (const size_t agents : {250, 500, 1000}) {
    const double seconds = rendezvous(agents);
    std::cout << agents << " agents: " << seconds << " s\n";
    EXPECT_LT(seconds, 30);
  }
}

}  // namespace
}  // namespace lockstep::hosts
