#include "hosts/channel.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#include "hosts/lobby.h"

namespace lockstep::hosts {
namespace {

/// A door, and agents that come to it, in one process.
class Channels : public ::testing::Test {
 protected:
  void SetUp() override {
    ::signal(SIGPIPE, SIG_IGN);
    lobby_.door().open({"127.0.0.1"}, 0);
  }

  FileDescriptor knock() {
    std::string why;
    return connect_to(lobby_.door().endpoints().front(), Deadline(std::chrono::seconds(5)), why);
  }

  void turn(std::vector<Channel*> channels = {}) {
    PollSet polled;
    lobby_.watch(polled);
    for (Channel* channel : channels)
      if (channel->state() != Channel::State::kClosed)
        polled.add(channel->fd(), channel->events(), [channel](const pollfd&) { channel->act(); });
    polled.wait(20);
    lobby_.tick();
    for (Arrival& arrival : lobby_.take_arrivals()) arrivals_.push_back(std::move(arrival));
  }

  /// Until the agent is in, or has been refused.
  void come_in(Channel& agent) {
    agent.act();
    for (int i = 0; i < 500 && agent.state() == Channel::State::kHandshake; ++i) turn({&agent});
  }

  const Key key_ = Key::generate();
  const Tls coordinator_{key_, Side::kCoordinator}, agents_{key_, Side::kAgent};
  Lobby lobby_{coordinator_};
  std::vector<Arrival> arrivals_;
};

TEST_F(Channels, AnAgentWithTheKeyComesInAndBothTalk) {
  Channel agent(knock(), agents_);
  come_in(agent);
  ASSERT_TRUE(agent.is_open()) << agent.reason();
  agent.send(Kind::kHello, Hello{.node = 1, .host = "node2"});
  for (int i = 0; i < 500 && arrivals_.empty(); ++i) turn({&agent});
  ASSERT_EQ(arrivals_.size(), 1u);
  EXPECT_EQ(arrivals_[0].hello.host, "node2");
  Channel& other = *arrivals_[0].channel;
  const std::string large(3 << 20, 'x');
  other.send(Kind::kStore, Store{.rank = 1, .bytes = large});
  std::string received;
  for (int i = 0; i < 500 && received.empty(); ++i) {
    turn({&agent, &other});
    if (const auto message = agent.next(kMaxFrameBytes)) received = decode<Store>(message->body).bytes;
  }
  EXPECT_EQ(received, large);
  EXPECT_EQ(lobby_.door().turned_away(), 0u);
}

TEST_F(Channels, AnotherKeyIsRefusedOnBothSides) {
  const Tls stranger(Key::generate(), Side::kAgent);
  Channel agent(knock(), stranger);
  come_in(agent);
  EXPECT_EQ(agent.state(), Channel::State::kClosed);
  EXPECT_TRUE(agent.key_was_refused());
  turn();
  EXPECT_EQ(lobby_.door().turned_away(), 1u);
  EXPECT_TRUE(arrivals_.empty());
  EXPECT_EQ(lobby_.take_news(), "1 connection without this run's key turned away, the last from 127.0.0.1");
  EXPECT_EQ(lobby_.take_news(), "");
}

TEST_F(Channels, AClientWithoutAKeyIsRefused) {
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  const FileDescriptor socket = knock();
  SSL* ssl = SSL_new(context);
  SSL_set_fd(ssl, socket.get());
  SSL_set_connect_state(ssl);
  SSL_do_handshake(ssl);
  for (int i = 0; i < 500 && lobby_.door().turned_away() == 0; ++i) turn();
  EXPECT_EQ(lobby_.door().turned_away(), 1u);
  for (int i = 0; i < 10; ++i) EXPECT_NE(SSL_do_handshake(ssl), 1);
  SSL_free(ssl);
  SSL_CTX_free(context);
}

TEST_F(Channels, ManySilentStrangersKeepNobodyOut) {
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(knock());
    turn();
  }
  Channel agent(knock(), agents_);
  come_in(agent);
  EXPECT_TRUE(agent.is_open()) << agent.reason();
  EXPECT_GE(lobby_.door().turned_away(), 200 - Door::kMostWaiting - 1);
  const Deadline deadline(Door::kHandshakeTime + std::chrono::seconds(1));
  while (lobby_.door().turned_away() < 200 && !deadline.passed()) turn({&agent});
  EXPECT_EQ(lobby_.door().turned_away(), 200u) << "each has its time, and no more";
}

TEST_F(Channels, AFirstMessageThatIsNoGreetingIsSentAway) {
  Channel agent(knock(), agents_);
  come_in(agent);
  agent.send(Kind::kOutput, Output{.rank = 1, .bytes = "x"});
  for (int i = 0; i < 500 && agent.state() == Channel::State::kOpen; ++i) turn({&agent});
  EXPECT_EQ(agent.state(), Channel::State::kClosed);
  const auto last = agent.next(kMaxFrameBytes);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->kind, Kind::kOver);
  EXPECT_TRUE(arrivals_.empty());
}

TEST_F(Channels, AFrameOverTheLimitClosesTheChannel) {
  Channel agent(knock(), agents_);
  come_in(agent);
  agent.send(Kind::kHello, Hello{.host = std::string(kMaxHelloBytes, 'x')});
  for (int i = 0; i < 500 && agent.state() == Channel::State::kOpen; ++i) turn({&agent});
  EXPECT_EQ(agent.state(), Channel::State::kClosed);
  EXPECT_TRUE(arrivals_.empty());
}

}  // namespace
}  // namespace lockstep::hosts
