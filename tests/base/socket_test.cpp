#include "base/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>
#include <vector>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

TEST(Socket, CarriesMoreThanItsBufferHolds) {
  auto [a, b] = make_socket_pair();
  std::vector<uint8_t> sent(8 << 20), received(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint8_t>(i * 7 + i / 251);
  std::thread sender([&, fd = a.get()] { send_all(fd, sent.data(), sent.size(), Deadline(milliseconds(10000))); });
  receive_all(b.get(), received.data(), received.size(), Deadline(milliseconds(10000)));
  sender.join();
  EXPECT_EQ(sent, received);
}

TEST(Socket, EveryWaitEnds) {
  auto [a, b] = make_socket_pair();
  std::vector<uint8_t> bytes(8 << 20);
  const auto start = Clock::now();
  EXPECT_THROW(send_all(a.get(), bytes.data(), bytes.size(), Deadline(milliseconds(50))), Error);
  EXPECT_THROW(receive_all(a.get(), bytes.data(), 1, Deadline(milliseconds(50))), Error);
  EXPECT_EQ(receive_some(a.get(), bytes.data(), 1, Deadline(milliseconds(0))), 0u);
  EXPECT_LT(seconds_since(start), 5);
}

TEST(Socket, NamesAPeerThatIsGone) {
  auto [a, b] = make_socket_pair();
  b.reset();
  char byte = 0;
  EXPECT_THROW(send_all(a.get(), &byte, 1, Deadline(milliseconds(1000))), ConnectionClosed);
  EXPECT_THROW(receive_all(a.get(), &byte, 1, Deadline(milliseconds(1000))), ConnectionClosed);
}

TEST(Socket, IsClosedOnExec) {
  auto [a, b] = make_socket_pair();
  const UnixListener listener = listen_unix();
  const FileDescriptor client = connect_unix(listener.name);
  const FileDescriptor accepted = accept_same_user(listener.socket.get());
  for (const int fd : {a.get(), b.get(), listener.socket.get(), client.get(), accepted.get()}) {
    ASSERT_GE(fd, 0);
    EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
  }
}

TEST(Socket, ListenerVanishesWithItsSocket) {
  UnixListener listener = listen_unix();
  EXPECT_FALSE(accept_same_user(listener.socket.get())) << "nobody waits";
  listener.socket.reset();
  EXPECT_THROW(connect_unix(listener.name), Error);
}

}  // namespace
}  // namespace lockstep
