// Links by a relay: `bert` cannot be connected to, because the port that the others know is nobody's or another
// machine's.

#include <fcntl.h>
#include <signal.h>

#include <deque>
#include <thread>

#include "hosts/links.h"
#include "hosts/relay_request.h"

namespace lockstep::hosts {
namespace {

constexpr uint32_t kOfR = 0x7fa30001;
constexpr int kNobodysPort = 1;  // the kernel gives it to no program that asks for any
constexpr int kMachines = 3;

class RelayedLinks : public Links {
 protected:
  // Before any thread.
  LinkProcess r_{key_, "127.0.0.1", 0};

  void begin_relayed(int port_of_b = kNobodysPort, uint32_t start = 0) {
    const LinkPeer a{"anna", "127.0.0.1", a_.port()}, b{"bert", "127.0.0.1", port_of_b},
        r{"ruth", "127.0.0.1", r_.port()};
    r_.begin({kOfR, 2, {a, b, r}, start, 2});
    a_.begin({kOfA, 0, {a, b, r}, start, 2});
    b_.begin({kOfB, 1, {a, b, r}, start, 2});
  }
  uint16_t rank_of_b() {
    rank_ = listen_on(LinkAddresses(kOfB, kMachines).text_of(1), 0);
    const auto port = static_cast<uint16_t>(rank_.endpoint.port);
    a_.open({1, port});
    return port;
  }
  std::string end_of(const FileDescriptor& socket) const {
    std::string text(64, '\0');
    pollfd polled{socket.get(), POLLIN, 0};
    if (::poll(&polled, 1, 15000) == 0) return "it waits";
    return ::recv(socket.get(), text.data(), text.size(), 0) <= 0 ? "ended" : "bytes";
  }
};

TEST_F(RelayedLinks, CarryBytesBothWaysAndTheEndsOfEachDirection) {
  begin_relayed();
  const FileDescriptor here = connect(rank_of_b());
  ASSERT_TRUE(here);
  std::string from;
  const FileDescriptor there = accepted(&from);
  ASSERT_TRUE(there);
  EXPECT_EQ(from, LinkAddresses(kOfB, kMachines).text_of(0));
  say(here, "hello");
  EXPECT_EQ(hear(there, 5), "hello");
  say(there, "and back");
  EXPECT_EQ(hear(here, 8), "and back");
  ::shutdown(here.get(), SHUT_WR);
  EXPECT_EQ(end_of(there), "ended") << "of one direction";
  say(there, "still");
  EXPECT_EQ(hear(here, 5), "still");
  const std::string news = news_of(a_);
  EXPECT_TRUE(news.starts_with("anna cannot connect to bert (")) << news;
  EXPECT_NE(news.find("): its data for it goes by the relay ruth"), std::string::npos) << news;
}

TEST_F(RelayedLinks, CarryMuchOnManyConnections) {
  begin_relayed();
  const uint16_t port = rank_of_b();
  constexpr int kConnections = 12;
  std::deque<FileDescriptor> here, there;
  for (int i = 0; i < kConnections; ++i) {
    here.push_back(connect(port));
    there.push_back(accepted());
    ASSERT_TRUE(here.back() && there.back()) << i;
    ASSERT_EQ(::fcntl(here.back().get(), F_SETFL, O_NONBLOCK), 0);
  }
  const std::string much(3 << 20, 'x');
  std::deque<std::thread> out;
  for (int i = 0; i < kConnections; ++i)
    out.emplace_back([&, i] {
      say(here[static_cast<size_t>(i)], std::to_string(100 + i) + much);
      say(there[static_cast<size_t>(i)], std::to_string(200 + i) + much);
    });
  // Connections may have met in another order.
  int sum = 0;
  for (int i = 0; i < kConnections; ++i) {
    const std::string text = hear(there[static_cast<size_t>(i)], much.size() + 3);
    sum += std::stoi(text.substr(0, 3));
    EXPECT_TRUE(text.substr(3) == much);
    EXPECT_TRUE(hear(here[static_cast<size_t>(i)], much.size() + 3).substr(3) == much);
  }
  for (std::thread& thread : out) thread.join();
  EXPECT_EQ(sum, 100 * kConnections + kConnections * (kConnections - 1) / 2);
}

TEST_F(RelayedLinks, AnotherMachineAtTheSameAddressIsNotTakenForIt) {
  begin_relayed(a_.port());  // in bert's own network, bert has the address that anna has in hers
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  say(here, "hello");
  EXPECT_EQ(hear(there, 5), "hello");
  EXPECT_TRUE(news_of(a_).starts_with("anna cannot connect to bert (another machine answers there)"));
}

TEST_F(RelayedLinks, ThoseOfAnEarlierStartEndAndNewOnesAreMade) {
  begin_relayed();
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  begin_relayed(kNobodysPort, 1);
  EXPECT_EQ(end_of(here), "ended");
  EXPECT_EQ(end_of(there), "ended");
  const FileDescriptor again = connect(rank_of_b()), again_there = accepted();
  ASSERT_TRUE(again && again_there);
  say(again, "hello");
  EXPECT_EQ(hear(again_there, 5), "hello");
}

TEST_F(RelayedLinks, AMachineThatDoesNotRegisterIsTold) {
  const LinkPeer a{"anna", "127.0.0.1", a_.port()}, b{"bert", "127.0.0.1", kNobodysPort},
      r{"ruth", "127.0.0.1", r_.port()};
  r_.begin({kOfR, 2, {a, b, r}, 0, 2});
  a_.begin({kOfA, 0, {a, b, r}, 0, 2});
  const FileDescriptor here = connect(rank_of_b());
  EXPECT_EQ(end_of(here), "ended");
  std::string news = news_of(a_);
  if (news.find("could not") == std::string::npos) news += news_of(a_);
  EXPECT_NE(news.find("could not make an encrypted link to bert: "), std::string::npos) << news;
  EXPECT_NE(news.find("the relay ruth has no connection from it"), std::string::npos) << news;
}

TEST_F(RelayedLinks, StrangersGetNothingFromARelay) {
  begin_relayed();
  const Key other = Key::generate();
  std::string why;
  for (const auto kind : {RelayRequest::kRegister, RelayRequest::kConnect, RelayRequest::kBind}) {
    const FileDescriptor stranger = connect_to({"127.0.0.1", r_.port()}, Deadline(milliseconds(2000)), why);
    ASSERT_TRUE(stranger);
    EXPECT_FALSE(ask_relay(stranger.get(), other, {.kind = kind, .from = 1, .to = 1}, Deadline(milliseconds(5000))));
  }
  const std::string news = news_of(r_);
  EXPECT_TRUE(news.starts_with("1 connection to the port of the encrypted links did not have the run's key")) << news;
  // Those who hold the key may still be wrong.
  const FileDescriptor wrong = connect_to({"127.0.0.1", r_.port()}, Deadline(milliseconds(2000)), why);
  EXPECT_FALSE(
      ask_relay(wrong.get(), key_, {.kind = RelayRequest::kBind, .token = 12345}, Deadline(milliseconds(5000))));
  const FileDescriptor odd = connect_to({"127.0.0.1", r_.port()}, Deadline(milliseconds(2000)), why);
  EXPECT_FALSE(ask_relay(odd.get(), key_, {.kind = 77}, Deadline(milliseconds(5000))));
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  say(here, "hello");
  EXPECT_EQ(hear(there, 5), "hello");
}

}  // namespace
}  // namespace lockstep::hosts
