#include "collectives/data_port.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "collectives/tcp.h"

namespace lockstep {
namespace {

const Connection rank_1{"10.0.0.2:4001", "10.0.0.1:5000"}, rank_2{"10.0.0.3:4002", "10.0.0.1:5000"};
const Connection stranger{"10.0.0.9:4003", "10.0.0.1:5000"}, elsewhere{"10.0.0.3:4004", "10.0.0.2:5001"};

TEST(FindStrangers, AreThoseThatNoRankHasMade) {
  Strangers found = find_strangers({rank_1, stranger, rank_2}, {rank_2, elsewhere, rank_1});
  EXPECT_EQ(found.shut_down, std::vector<Connection>{stranger});
  EXPECT_TRUE(found.untold.empty());
  found = find_strangers({rank_1, rank_2}, {rank_2, elsewhere, rank_1});
  EXPECT_TRUE(found.shut_down.empty() && found.untold.empty());
  found = find_strangers({stranger}, {elsewhere});
  EXPECT_EQ(found.shut_down, std::vector<Connection>{stranger}) << "no rank had to come here";
}

TEST(FindStrangers, AreNotToldApartWhereTheNetworkTranslatesAddresses) {
  const Connection gateway{"192.168.0.1:7000", rank_2.to};  // rank 2 as it arrived
  Strangers found = find_strangers({rank_1, gateway}, {rank_1, rank_2});
  EXPECT_TRUE(found.shut_down.empty());
  EXPECT_EQ(found.untold, std::vector<Connection>{gateway});
  found = find_strangers({rank_1, gateway, stranger}, {rank_1, rank_2});
  EXPECT_TRUE(found.shut_down.empty()) << "one of the two is a rank";
  EXPECT_EQ(found.untold.size(), 2U);
}

/// A port of this process and connections to it, as Gloo has them.
class Port {
 public:
  explicit Port(const std::string& host) : host_(host) {}

  void open() { listener_ = listen_tcp(host_, 0); }

  /// A connection that was accepted, or, after `wait_ms` without an answer, one that was not.
  FileDescriptor connect(int wait_ms) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    if (::getsockname(listener_.get(), place, &length) != 0) throw Error("the port has no name");
    FileDescriptor socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ::connect(socket.get(), place, length);
    pollfd waiting{.fd = listener_.get(), .events = POLLIN};
    if (::poll(&waiting, 1, wait_ms) == 1) accepted_.emplace_back(::accept4(listener_.get(), nullptr, nullptr, 0));
    return socket;
  }
  size_t accepted() const { return accepted_.size(); }

 private:
  const std::string host_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> accepted_;
};

/// Whether the other end has been shut down.
bool is_shut_down(const FileDescriptor& socket) {
  char byte;
  return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
}

TEST(DataPort, LetsNobodyInAndShutsDownWhoIsNoRank) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    SCOPED_TRACE(host);
    Port port(host);
    const DataPort closing([&] { port.open(); });
    const FileDescriptor rank = port.connect(10000);
    const std::vector<Connection> made = closing.made();
    ASSERT_EQ(made.size(), 1U);
    const FileDescriptor uninvited = port.connect(10000);
    ASSERT_EQ(port.accepted(), 2U);
    EXPECT_EQ(closing.made().size(), 2U) << "it is in this process, too";

    const Strangers found = closing.close(made);
    ASSERT_EQ(found.shut_down.size(), 1U);
    EXPECT_EQ(found.shut_down[0].to, made[0].to);
    EXPECT_NE(found.shut_down[0].from, made[0].from);
    EXPECT_TRUE(is_shut_down(uninvited));
    EXPECT_FALSE(is_shut_down(rank));
    const FileDescriptor late = port.connect(200);
    EXPECT_EQ(port.accepted(), 2U);
  }
}

TEST(DataPort, WithoutADescriptorToLookNothingIsConcluded) {
  Port port("127.0.0.1");
  const DataPort closing([&] { port.open(); });
  const FileDescriptor rank = port.connect(10000);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none_left = before;
  none_left.rlim_cur = static_cast<rlim_t>(FileDescriptor(::dup(rank.get())).get());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  EXPECT_THROW(closing.made(), LimitError);
  EXPECT_THROW(closing.close({}), LimitError);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_FALSE(is_shut_down(rank));
}

TEST(DataPort, AnotherPortOfTheProgramIsLeftAlone) {
  Port gloo("127.0.0.1"), program("127.0.0.1");
  const DataPort closing([&] {
    gloo.open();
    program.open();  // by another thread, at that moment
  });
  const FileDescriptor rank = gloo.connect(10000);
  const std::vector<Connection> made = closing.made();
  const FileDescriptor visitor = program.connect(10000);
  EXPECT_TRUE(closing.close(made).shut_down.empty());
  EXPECT_FALSE(is_shut_down(visitor));
  const FileDescriptor next = program.connect(10000);
  EXPECT_EQ(program.accepted(), 2U);
}

}  // namespace
}  // namespace lockstep
