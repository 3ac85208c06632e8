#include "hosts/round_hub.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "hosts/lobby.h"

namespace lockstep::hosts {
namespace {

using hub::Kind;

/// A hub, and the agents of machines that speak with it, in one process.
class Rounds : public ::testing::Test {
 protected:
  struct Heard {
    Kind kind;
    std::string body;
  };

  void SetUp() override {
    ::signal(SIGPIPE, SIG_IGN);
    lobby_.door().open({"127.0.0.1"}, 0);
  }

  void make(int islands, int least, std::optional<std::chrono::milliseconds> deadline = std::nullopt) {
    hub_.emplace(RoundHub::Options{.islands = islands,
                                   .least = least,
                                   .deadline = deadline,
                                   .tell = [this](const std::string& text) { told_ += text + "\n"; },
                                   .record = [this](const std::string& line) { records_.push_back(line); }});
    for (int island = 0; island < islands; ++island) connect(island);
  }

  void connect(int island) {
    std::string why;
    agents_[island] = std::make_unique<Channel>(
        connect_to(lobby_.door().endpoints().front(), Deadline(std::chrono::seconds(5)), why), of_agents_);
    agents_[island]->act();
    turn_until([&] { return agents_[island]->is_open(); });
    agents_[island]->send(hosts::Kind::kHello, Hello{.node = island});
    turn_until([&] { return hub_->is_connected(island); });
    ASSERT_TRUE(hub_->is_connected(island));
  }

  template <typename Condition>
  void turn_until(const Condition& holds) {
    for (const Deadline deadline(std::chrono::seconds(10)); !holds() && !deadline.passed();) turn();
  }

  void turn() {
    PollSet polled;
    lobby_.watch(polled);
    hub_->watch(polled);
    for (auto& [island, agent] : agents_)
      polled.add(agent->fd(), agent->events(), [one = agent.get()](const pollfd&) { one->act(); });
    polled.wait(10);
    lobby_.tick();
    for (Arrival& arrival : lobby_.take_arrivals()) hub_->admit(arrival.hello.node, std::move(arrival.channel));
    hub_->tick(Clock::now());
    for (auto& [island, agent] : agents_) {
      if (island != silent_ && hub_->is_connected(island)) agent->send_bytes(static_cast<uint8_t>(Kind::kAlive), {});
      while (const auto message = agent->next(hub::kMostBytes))
        if (message->kind != hosts::Kind::kBeat)
          heard_[island].push_back({static_cast<Kind>(message->kind), std::string(message->body)});
    }
  }

  void send(int island, Kind kind, const std::string& body = {}) {
    agents_[island]->send_bytes(static_cast<uint8_t>(kind), body);
  }
  void join(int island, int64_t round = 0, uint64_t model = 7, const std::string& lines = "", int32_t fragments = 1) {
    std::string body;
    if (fragments > 1) hub::put(body, fragments);
    hub::put(body, round);
    hub::put(body, model);
    send(island, fragments > 1 ? Kind::kJoinFragments : Kind::kJoin, body + lines);
  }
  void contribute(int island, int64_t round, int64_t step, const std::string& numbers, uint64_t outer = 5,
                  bool takes_part = true) {
    std::string body;
    hub::put(body, round);
    hub::put(body, step);
    hub::put(body, static_cast<uint8_t>(takes_part ? 1 : 0));
    hub::put(body, outer);
    send(island, Kind::kContribute, body + numbers);
  }
  void give(int island, int64_t round, const std::string& state) {
    std::string body;
    hub::put(body, round);
    send(island, Kind::kState, body + state);
  }

  /// The next message to a machine; fails after five seconds.
  Heard next(int island) {
    for (const Deadline deadline(std::chrono::seconds(5)); heard_[island].empty() && !deadline.passed();) turn();
    if (heard_[island].empty()) {
      ADD_FAILURE() << "machine " << island << " hears nothing; " << told_;
      return {};
    }
    const Heard first = heard_[island].front();
    heard_[island].erase(heard_[island].begin());
    return first;
  }
  bool hears_nothing(int island) {
    for (const Deadline deadline(std::chrono::milliseconds(50)); !deadline.passed();) turn();
    return heard_[island].empty();
  }
  /// "1: aa bb", the round and what those that took part had sent.
  std::string result(int island) {
    const Heard heard = next(island);
    EXPECT_EQ(heard.kind, Kind::kResult);
    std::string_view rest = heard.body;
    std::string text = std::to_string(hub::take<int64_t>(rest)) + ":";
    hub::take<int32_t>(rest);
    for (auto count = hub::take<int32_t>(rest); count > 0; --count) {
      hub::take<int32_t>(rest);
      text += " " + std::string(hub::take_bytes(rest));
    }
    return text;
  }
  void start(const std::vector<int>& islands) {
    for (const int island : islands) join(island);
    EXPECT_EQ(next(islands.front()).kind, Kind::kGive);
    give(islands.front(), 0, "state");
    for (const int island : islands) {
      if (island == islands.front()) continue;
      EXPECT_EQ(next(island).kind, Kind::kTake);
    }
  }

  const Key key_ = Key::generate();
  const Tls of_hub_{key_, Side::kCoordinator}, of_agents_{key_, Side::kAgent};
  Lobby lobby_{of_hub_};
  std::optional<RoundHub> hub_;
  std::map<int, std::unique_ptr<Channel>> agents_;
  std::map<int, std::vector<Heard>> heard_;
  std::vector<std::string> records_;
  std::string told_;
  int silent_ = -1;
};

TEST_F(Rounds, AllGetWhatAllHaveSentInTheOrderOfTheMachines) {
  make(3, 3);
  start({0, 1, 2});
  contribute(2, 1, 20, "c");
  contribute(0, 1, 20, "a");
  EXPECT_TRUE(hears_nothing(0));
  contribute(1, 1, 20, "b");
  for (const int island : {0, 1, 2}) EXPECT_EQ(result(island), "1: a b c");
  ASSERT_EQ(records_.size(), 1u);
  EXPECT_NE(records_[0].find("\"took_part\": [0, 1, 2], \"left_out\": {}, \"bytes\": 3"), std::string::npos)
      << records_[0];
}

TEST_F(Rounds, AMachineWhoseChannelEndsIsNotWaitedForAndWhatItHasSentGoesWithIt) {
  make(3, 2);
  start({0, 1, 2});
  contribute(0, 1, 20, "a");
  contribute(2, 1, 20, "c");
  EXPECT_TRUE(hears_nothing(0));
  agents_.erase(2);
  contribute(1, 1, 20, "b");
  EXPECT_EQ(result(0), "1: a b");
  EXPECT_EQ(result(1), "1: a b");
}

TEST_F(Rounds, ASilentMachineIsLeftOutWithinASecond) {
  make(2, 1);
  start({0, 1});
  contribute(0, 1, 20, "a");
  silent_ = 1;
  const auto since = Clock::now();
  EXPECT_EQ(result(0), "1: a");
  EXPECT_LT(seconds_since(since), 1);
  EXPECT_NE(told_.find("machine 1 is left out: it was silent for 800 ms"), std::string::npos) << told_;
}

TEST_F(Rounds, WithoutEnoughMachinesNoRoundIsClosedUntilOneIsBack) {
  make(2, 2);
  start({0, 1});
  contribute(0, 1, 20, "a");
  agents_.erase(1);
  EXPECT_TRUE(hears_nothing(0));
  connect(1);
  join(1);
  EXPECT_EQ(result(0), "1: a");
}

TEST_F(Rounds, OneThatComesBackGetsTheStateAndTheRoundsSinceAndHearsWhatCounted) {
  make(2, 1);
  start({0, 1});
  for (const int island : {0, 1}) contribute(island, 1, 20 + island, "x");
  for (const int island : {0, 1}) EXPECT_EQ(result(island), "1: x x");
  send(1, Kind::kGone);
  join(1);
  contribute(0, 2, 40, "a");
  EXPECT_EQ(result(0), "2: a");
  contribute(0, 3, 60, "b");
  EXPECT_EQ(result(0), "3: b");
  give(0, 2, "state");
  const Heard take = next(1);
  ASSERT_EQ(take.kind, Kind::kTake);
  std::string_view rest = take.body;
  EXPECT_EQ(hub::take<int64_t>(rest), 2);
  EXPECT_EQ(hub::take<uint8_t>(rest), 0) << "it does not start with the others";
  EXPECT_EQ(hub::take<int64_t>(rest), 21) << "the step of what counted last";
  EXPECT_EQ(hub::take<int64_t>(rest), 1);
  EXPECT_EQ(rest, "state");
  EXPECT_EQ(result(1), "3: b");
  contribute(0, 4, 80, "c");
  EXPECT_EQ(result(0), "4: c") << "nobody waits for it";
  EXPECT_EQ(result(1), "4: c");
  contribute(1, 5, 81, "d");
  contribute(0, 5, 100, "e");
  EXPECT_EQ(result(1), "5: e d");
}

TEST_F(Rounds, AMachineMayBeAheadByRoundsWhichCloseInTheirOrder) {
  make(2, 2);
  start({0, 1});
  for (int64_t round = 1; round <= 3; ++round) contribute(0, round, 20 * round, "a" + std::to_string(round));
  EXPECT_TRUE(hears_nothing(0));
  contribute(1, 1, 20, "b1");
  EXPECT_EQ(result(0), "1: a1 b1");
  contribute(1, 2, 40, "b2");
  contribute(1, 3, 60, "b3");
  EXPECT_EQ(result(0), "2: a2 b2");
  EXPECT_EQ(result(0), "3: a3 b3");
  EXPECT_EQ(result(1), "1: a1 b1");
}

TEST_F(Rounds, AllThatALostMachineHasSentForOpenRoundsGoesWithIt) {
  make(3, 2);
  start({0, 1, 2});
  for (int64_t round = 1; round <= 2; ++round)
    for (const int island : {0, 2})
      contribute(island, round, 20 * round, std::string(1, static_cast<char>('a' + island)));
  EXPECT_TRUE(hears_nothing(0));
  send(2, Kind::kGone);
  contribute(1, 1, 20, "b");
  contribute(1, 2, 40, "b");
  EXPECT_EQ(result(0), "1: a b");
  EXPECT_EQ(result(0), "2: a b");
}

TEST_F(Rounds, EachOpenRoundHasADeadlineOfItsOwn) {
  make(3, 1, std::chrono::milliseconds(300));
  start({0, 1, 2});
  for (const int island : {0, 1}) contribute(island, 1, 20, "a");
  EXPECT_TRUE(hears_nothing(0));
  for (const Deadline deadline(std::chrono::milliseconds(150)); !deadline.passed();) turn();
  contribute(0, 2, 40, "b");
  EXPECT_EQ(result(0), "1: a a");
  EXPECT_TRUE(hears_nothing(0)) << "machine 1 has time";
  contribute(1, 2, 40, "c");
  EXPECT_EQ(result(0), "2: b c");
}

TEST_F(Rounds, OneThatComesBackHearsWhatCountedOfEachFragment) {
  make(2, 1);
  join(0, 0, 7, "", /*fragments=*/2);
  join(1, 0, 7, "", /*fragments=*/2);
  EXPECT_EQ(next(0).kind, Kind::kGive);
  give(0, 0, "state");
  const Heard first = next(1);
  ASSERT_EQ(first.kind, Kind::kTakeFragments);
  std::string nothing(sizeof(int64_t) + 1 + 4 * sizeof(int64_t), '\0');
  nothing[sizeof(int64_t)] = 1;  // it starts with the others
  EXPECT_EQ(first.body, nothing + "state") << "nothing has counted";
  for (int64_t round = 1; round <= 3; ++round)
    for (const int island : {0, 1}) contribute(island, round, 10 * round + island, "x");
  for (int64_t round = 1; round <= 3; ++round) EXPECT_EQ(result(0), std::to_string(round) + ": x x");
  send(1, Kind::kGone);
  join(1, 0, 7, "", 2);
  contribute(0, 4, 40, "a");
  EXPECT_EQ(result(0), "4: a");
  give(0, 4, "state");
  Heard take = next(1);
  while (take.kind == Kind::kResult) take = next(1);
  ASSERT_EQ(take.kind, Kind::kTakeFragments);
  std::string_view rest = take.body;
  EXPECT_EQ(hub::take<int64_t>(rest), 4);
  EXPECT_EQ(hub::take<uint8_t>(rest), 0);
  for (const int64_t expected : {21, 2, 31, 3}) EXPECT_EQ(hub::take<int64_t>(rest), expected);
  EXPECT_EQ(rest, "state");
}

TEST_F(Rounds, ALateMachineIsNotWaitedForAfterTheDeadline) {
  make(2, 2, std::chrono::milliseconds(100));
  start({0, 1});
  contribute(0, 1, 20, "a");
  EXPECT_EQ(result(0), "1: a");
  EXPECT_EQ(result(1), "1: a");
  contribute(1, 1, 20, "late");
  contribute(1, 2, 30, "b");
  contribute(0, 2, 40, "c");
  EXPECT_EQ(result(0), "2: c b");
}

TEST_F(Rounds, AMachineThatWasLateIsAwaitedInTheRoundAfterItHasComeBack) {
  make(2, 1, std::chrono::milliseconds(400));
  start({0, 1});
  contribute(0, 1, 20, "a");
  EXPECT_EQ(result(0), "1: a");
  EXPECT_EQ(result(1), "1: a");
  contribute(1, 1, 20, "late");
  contribute(0, 2, 40, "c");
  EXPECT_TRUE(hears_nothing(0)) << "it waits for machine 1";
  contribute(1, 2, 30, "b");
  EXPECT_EQ(result(0), "2: c b");
  EXPECT_EQ(result(1), "2: c b");
  contribute(0, 3, 60, "d");
  EXPECT_EQ(result(0), "3: d");
  contribute(0, 4, 80, "e");
  EXPECT_EQ(result(0), "4: e") << "one that has not come back is not waited for";
}

TEST_F(Rounds, AMachineThatHasTheStateIsAwaitedForAsLongAsItLivesWhenItSaysThatItIsLate) {
  make(2, 1);
  start({0, 1});
  for (const int island : {0, 1}) contribute(island, 1, 20, "x");
  EXPECT_EQ(result(0), "1: x x");
  send(1, Kind::kGone);
  join(1);
  contribute(0, 2, 40, "a");
  EXPECT_EQ(result(0), "2: a");
  give(0, 2, "state");
  EXPECT_EQ(result(1), "1: x x");
  EXPECT_EQ(next(1).kind, Kind::kTake);
  contribute(0, 3, 60, "b");
  EXPECT_EQ(result(0), "3: b");
  send(1, Kind::kLate);
  contribute(0, 4, 80, "c");
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(hears_nothing(0));
  EXPECT_EQ(result(1), "3: b");
  contribute(1, 4, 30, "d");
  EXPECT_EQ(result(0), "4: c d");
}

TEST_F(Rounds, OneThatWaitsHearsThatAnotherMakesSteps) {
  make(2, 2);
  start({0, 1});
  send(1, Kind::kStep);
  EXPECT_TRUE(hears_nothing(0)) << "it does not wait";
  contribute(0, 1, 20, "a");
  turn_until([&] { return hears_nothing(0); });
  send(1, Kind::kStep);
  EXPECT_EQ(next(0).kind, Kind::kSteps);
  EXPECT_TRUE(hears_nothing(1));
}

TEST_F(Rounds, OneThatWaitsHearsThatALargeContributionIsOnItsWay) {
  make(2, 2);
  start({0, 1});
  contribute(0, 1, 20, "a");
  EXPECT_TRUE(hears_nothing(0));
  contribute(1, 1, 20, std::string(32 << 20, 'b'));
  EXPECT_EQ(next(0).kind, Kind::kSteps);
  Heard heard = next(0);
  while (heard.kind == Kind::kSteps) heard = next(0);  // one a second
  EXPECT_EQ(heard.kind, Kind::kResult);
}

TEST_F(Rounds, OneThatIsNotFiniteIsNamed) {
  make(2, 2);
  start({0, 1});
  contribute(0, 1, 20, "a");
  contribute(1, 1, 20, "", 5, /*takes_part=*/false);
  EXPECT_EQ(result(1), "1: a");
  EXPECT_NE(records_[0].find("{\"1\": \"its parameters were not finite\"}"), std::string::npos) << records_[0];
}

TEST_F(Rounds, AnOuterCopyThatDiffersIsNotAddedUp) {
  make(3, 2);
  start({0, 1, 2});
  contribute(0, 1, 20, "a", /*outer=*/6);
  contribute(1, 1, 20, "b");
  contribute(2, 1, 20, "c");
  EXPECT_EQ(result(1), "1: b c");
  EXPECT_NE(told_.find("machine 0 is left out: its outer copy differs"), std::string::npos) << told_;
}

TEST_F(Rounds, AnotherModelIsRefused) {
  make(2, 2);
  join(0, 0, 7, "sync_every 4\nranks 1\n");
  turn();
  join(1, 0, /*model=*/8, "sync_every 4\nranks 2\n");
  const Heard heard = next(1);
  EXPECT_EQ(heard.kind, Kind::kRefused);
  EXPECT_NE(heard.body.find("machine 1 has another model"), std::string::npos) << heard.body;
  EXPECT_NE(heard.body.find("machine 1 has `ranks 2`, and machine 0 `ranks 1`"), std::string::npos) << heard.body;
}

TEST_F(Rounds, OneThatComesWhenTheOthersHaveFinishedIsRefused) {
  make(2, 1);
  start({0, 1});
  for (const int island : {0, 1}) contribute(island, 1, 20, "x");
  EXPECT_EQ(result(0), "1: x x");
  send(1, Kind::kGone);
  send(0, Kind::kLeave);
  join(1);
  const Heard heard = [&] {
    for (Heard one = next(1);; one = next(1))
      if (one.kind != Kind::kResult) return one;
  }();
  EXPECT_EQ(heard.kind, Kind::kRefused);
  EXPECT_NE(heard.body.find("comes when the others have finished"), std::string::npos) << heard.body;
}

}  // namespace
}  // namespace lockstep::hosts
