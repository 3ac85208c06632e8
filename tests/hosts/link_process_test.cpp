#include "hosts/link_process.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "base/clock.h"
#include "base/environment.h"
#include "base/socket.h"
#include "hosts/addresses.h"
#include "hosts/links.h"
#include "hosts/tls.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

using std::chrono::milliseconds;

/// A connection's relay that may change what goes through.
class Wiretap {
 public:
  explicit Wiretap(const Endpoint& to) : to_(to), listener_(listen_on("127.0.0.1", 0)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Wiretap() {
    over_ = true;
    thread_.join();
  }
  Wiretap(const Wiretap&) = delete;
  Wiretap& operator=(const Wiretap&) = delete;
  int port() const { return listener_.endpoint.port; }
  void flip_a_byte() { flips_ = true; }
  bool saw(const std::string& text) const { return seen_.find(text) != std::string::npos; }
  size_t bytes() const { return seen_.size(); }

 private:
  void run() {
    FileDescriptor one, other;
    while (!over_) {
      pollfd polled[] = {{listener_.socket.get(), POLLIN, 0}, {one.get(), POLLIN, 0}, {other.get(), POLLIN, 0}};
      ::poll(polled, 3, 20);
      if (polled[0].revents != 0 && !one) {
        one = FileDescriptor(::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
        std::string why;
        other = connect_to(to_, Deadline(milliseconds(2000)), why);
      }
      if (polled[1].revents != 0) pass(one, other);
      if (polled[2].revents != 0) pass(other, one);
    }
  }
  void pass(FileDescriptor& from, FileDescriptor& to) {
    std::string bytes(1 << 16, '\0');
    const ssize_t count = ::recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) {
      ::shutdown(to.get(), SHUT_WR);
      from.reset();
      return;
    }
    bytes.resize(static_cast<size_t>(count));
    seen_ += bytes;
    if (flips_.exchange(false)) bytes[bytes.size() / 2] ^= 1;
    try {
      send_all(to.get(), bytes.data(), bytes.size(), Deadline(milliseconds(5000)));
    } catch (const Error&) {
      from.reset();
    }
  }

  const Endpoint to_;
  const Listener listener_;
  std::string seen_;
  std::atomic<bool> flips_ = false, over_ = false;
  std::thread thread_;
};

TEST_F(Links, CarryBytesBothWaysAndTheEndsOfEachDirection) {
  begin();
  const FileDescriptor here = connect(rank_of_b());
  ASSERT_TRUE(here);
  std::string from;
  uint16_t port = 0;
  const FileDescriptor there = accepted(&from, &port);
  ASSERT_TRUE(there);
  EXPECT_EQ(from, LinkAddresses(kOfB, 2).text_of(0)) << "the address that stands for the other machine";
  sockaddr_in own{};
  socklen_t length = sizeof own;
  ::getsockname(here.get(), reinterpret_cast<sockaddr*>(&own), &length);
  EXPECT_EQ(port, ntohs(own.sin_port)) << "the port of the rank that connected";
  say(here, "hello");
  EXPECT_EQ(hear(there, 5), "hello");
  say(there, "and back");
  EXPECT_EQ(hear(here, 8), "and back");
  ::shutdown(here.get(), SHUT_WR);
  char byte;
  EXPECT_EQ(::recv(there.get(), &byte, 1, 0), 0) << "the end of one direction";
  say(there, "still");
  EXPECT_EQ(hear(here, 5), "still");
}

TEST_F(Links, CarryMuchBothWaysAtOnce) {
  begin();
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  std::string much(48 << 20, '\0');
  std::mt19937 random(1);
  for (char& byte : much) byte = static_cast<char>(random());
  std::string back;
  const auto start = Clock::now();
  std::thread echo([&] {
    for (size_t got = 0; got < much.size();) {
      char piece[1 << 16];
      const ssize_t count = ::recv(there.get(), piece, sizeof piece, 0);
      if (count <= 0) return;
      send_all(there.get(), piece, static_cast<size_t>(count), Deadline(milliseconds(60000)));
      got += static_cast<size_t>(count);
    }
  });
  std::thread out([&] { send_all(here.get(), much.data(), much.size(), Deadline(milliseconds(60000))); });
  back.resize(much.size());
  receive_all(here.get(), back.data(), back.size(), Deadline(milliseconds(60000)));
  out.join();
  echo.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  EXPECT_TRUE(back == much);
  RecordProperty("Gbit/s there and back", std::to_string(16.0 * static_cast<double>(much.size()) / seconds / 1e9));
}

/// What a full buffer of the relay leaves behind must not wait for more to arrive.
TEST_F(Links, AMessageArrivesWholeWhereverItsEndFalls) {
  begin();
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  const int most = 4 << 20;
  for (const FileDescriptor* socket : {&here, &there}) {
    ::setsockopt(socket->get(), SOL_SOCKET, SO_SNDBUF, &most, sizeof most);
    ::setsockopt(socket->get(), SOL_SOCKET, SO_RCVBUF, &most, sizeof most);
  }
  for (int i = 0; i < 400; ++i) {
    const size_t bytes = (size_t{256} << 10) * static_cast<size_t>(1 + i % 3) + static_cast<size_t>(1 + 37 * i);
    const std::string text(bytes, static_cast<char>('a' + i % 26));
    std::thread out([&] { say(here, text); });
    const bool is_whole = hear(there, bytes) == text;
    out.join();
    ASSERT_TRUE(is_whole) << bytes;
  }
}

TEST_F(Links, AReaderThatStopsDoesNotStopOthersAndLosesNothing) {
  begin();
  const uint16_t port = rank_of_b();
  const FileDescriptor slow = connect(port), slow_there = accepted();
  const FileDescriptor quick = connect(port), quick_there = accepted();
  ASSERT_TRUE(slow && slow_there && quick && quick_there);
  const std::string much(16 << 20, 'x');
  std::thread out([&] { say(slow, much); });
  std::this_thread::sleep_for(milliseconds(200));
  say(quick, "hello");
  EXPECT_EQ(hear(quick_there, 5), "hello");
  EXPECT_TRUE(hear(slow_there, much.size()) == much);
  out.join();
}

TEST_F(Links, NothingIsReadableOnTheWireAndAChangedByteBreaksTheLinkByName) {
  Wiretap tap({"127.0.0.1", b_.port()});
  begin(tap.port());
  const FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  const std::string secret = "SECRET_GRADIENT_";
  std::string text;
  for (int i = 0; i < 1000; ++i) text += secret;
  say(here, text);
  EXPECT_EQ(hear(there, text.size()), text);
  EXPECT_GT(tap.bytes(), text.size());
  EXPECT_FALSE(tap.saw(secret));
  tap.flip_a_byte();
  say(here, "hello");
  char byte;
  EXPECT_LE(::recv(there.get(), &byte, 1, 0), 0) << "what was changed does not arrive";
  EXPECT_LE(::recv(here.get(), &byte, 1, 0), 0);
  const std::string news = news_of(b_);
  EXPECT_TRUE(
      news.starts_with("the encrypted link between bert and anna broke: what arrived from anna is not what it "
                       "sent (TLS: "))
      << news;
  EXPECT_TRUE(news_of(a_).starts_with("the encrypted link between anna and bert broke: bert refused what arrived"));
  EXPECT_TRUE(news_of(b_).starts_with("could not keep its encrypted link to anna: what arrived from anna is not what"))
      << "ranks may still wait";
}

/// As when ranks leave at different times: what was sent to one that is gone is nobody's, and no link is broken.
TEST_F(Links, ARankThatIsGoneBreaksNoLink) {
  begin();
  FileDescriptor here = connect(rank_of_b()), there = accepted();
  ASSERT_TRUE(here && there);
  const std::string much(8 << 20, 'x');
  std::thread out([&] {
    try {
      say(here, much);
    } catch (const Error&) {
    }
  });
  hear(there, 1 << 20);
  there.reset();  // with data that it has not read
  out.join();
  char byte;
  pollfd ended{here.get(), POLLIN, 0};  // the socket does not wait
  ::poll(&ended, 1, 5000);
  EXPECT_EQ(::recv(here.get(), &byte, 1, 0), 0) << "the end of the other rank";
  here.reset();
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_TRUE(a_.take_news().empty());
    EXPECT_TRUE(b_.take_news().empty());
  }
}

TEST_F(Links, OneThatNobodyTakesIsTold) {
  begin();
  const uint16_t port = rank_of_b();
  rank_.socket.reset();
  const FileDescriptor here = connect(port);
  char byte;
  EXPECT_LE(::recv(here.get(), &byte, 1, 0), 0);
  const std::string news = news_of(a_);
  EXPECT_TRUE(news.starts_with("there is no encrypted link from anna to bert: ")) << news;
  EXPECT_NE(news.find("no rank there listens on port " + std::to_string(port)), std::string::npos) << news;
}

TEST_F(Links, ThoseOfAnEarlierStartEndSilently) {
  begin();
  const uint16_t port = rank_of_b();
  const FileDescriptor here = connect(port), there = accepted();
  ASSERT_TRUE(here && there);
  begin();
  char byte;
  EXPECT_LE(::recv(here.get(), &byte, 1, 0), 0);
  EXPECT_LE(::recv(there.get(), &byte, 1, 0), 0);
  EXPECT_FALSE(connect(port)) << "the new start has not opened it";
  EXPECT_TRUE(a_.take_news().empty());
  a_.open({1, port});
  const FileDescriptor again = connect(port), again_there = accepted();
  say(again, "hello");
  EXPECT_EQ(hear(again_there, 5), "hello");
}

TEST_F(Links, ARankOfAnEarlierStartDoesNotReachThoseOfThisOne) {
  begin(0, 1);
  const FileDescriptor here = connect(rank_of_b());
  ASSERT_TRUE(here);
  char byte;
  EXPECT_LE(::recv(here.get(), &byte, 1, 0), 0);
  pollfd polled{rank_.socket.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&polled, 1, 200), 0);
}

TEST_F(Links, AnAnswerThatCameTooLateIsNotTheNextOnes) {
  begin();
  const pid_t process = process_of_a();
  if (process == 0) GTEST_SKIP() << "this kernel does not list children";
  const uint16_t port = rank_of_b();
  ::kill(process, SIGSTOP);
  EXPECT_THROW(a_.open({1, static_cast<uint16_t>(port - 1)}), LaunchError);
  ::kill(process, SIGCONT);
  const Listener taken = listen_on(LinkAddresses(kOfA, 2).text_of(1), 0);
  EXPECT_THROW(a_.open({1, static_cast<uint16_t>(taken.endpoint.port)}), LaunchError) << "the answer to this order";
  a_.open({1, port});
}

TEST_F(Links, TheEndOfTheProcessIsToldOnce) {
  begin();
  const pid_t process = process_of_a();
  if (process == 0) GTEST_SKIP() << "this kernel does not list children";
  ::kill(process, SIGKILL);
  EXPECT_EQ(news_of(a_), "could not carry its encrypted links: their process has ended\n");
  pollfd polled{a_.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&polled, 1, 50), 0) << "nothing more wakes the agent";
  EXPECT_THROW(a_.open({1, 40000}), LaunchError);
}

TEST_F(Links, WrongOrdersAreRefused) {
  begin();
  EXPECT_THROW(a_.open({7, 40000}), LaunchError);
  const Listener taken = listen_on(LinkAddresses(kOfA, 2).text_of(1), 0);
  try {
    a_.open({1, static_cast<uint16_t>(taken.endpoint.port)});
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_NE(std::string(error.what()).find("which stands for bert here, cannot be used: Address already in use"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(Links, StrangersGetNothingAndDoNotKeepRanksOut) {
  begin();
  const uint16_t port = rank_of_b();
  const Tls wrong(Key::generate(), Side::kAgent);
  std::vector<FileDescriptor> silent;
  std::string why;
  const int attempts = Environment::from_process().lockstep_nightly ? 100000 : 200;
  for (int i = 0; i < attempts; ++i) {
    if (silent.size() == 200) silent.erase(silent.begin(), silent.begin() + 100);
    FileDescriptor socket = connect_to({"127.0.0.1", b_.port()}, Deadline(milliseconds(2000)), why);
    if (!socket) continue;
    if (i % 3 == 0) {
      const Tls::Session session = wrong.connect(socket.get());
      SSL_do_handshake(session.get());
    } else if (i % 3 == 1) {
      say(socket, "GET / HTTP/1.0\r\n\r\n");
    }
    silent.push_back(std::move(socket));
    if (i % 50 != 0) continue;
    const FileDescriptor here = connect(port), there = accepted();
    ASSERT_TRUE(here && there);
    say(here, "hello");
    EXPECT_EQ(hear(there, 5), "hello");
  }
  EXPECT_TRUE(news_of(b_).starts_with("1 connection to the port of the encrypted links did not have the run's key"));
}

}  // namespace
}  // namespace lockstep::hosts
