#include "collectives/tcp.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "base/error.h"

namespace lockstep {
namespace {

sockaddr_in address_of(const FileDescriptor& socket) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return address;
}

bool can_connect(const char* host, in_port_t port) {
  const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = port};
  ::inet_pton(AF_INET, host, &address.sin_addr);
  return ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}

std::string failure(const std::string& host, int port) {
  try {
    listen_tcp(host, port);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ListenTcp, TakesConnectionsOfItsAddressAndOfNoOther) {
  const FileDescriptor listener = listen_tcp("127.0.0.1", 0);
  const in_port_t port = address_of(listener).sin_port;
  EXPECT_TRUE(can_connect("127.0.0.1", port));
  EXPECT_FALSE(can_connect("127.0.0.2", port)) << "it listens on the wildcard address";
}

TEST(ListenTcp, RefusesTheWildcardAddress) {
  for (const char* host : {"0.0.0.0", "::", "::ffff:0.0.0.0", "0"}) {
    const std::string text = failure(host, 0);
    EXPECT_NE(text.find(host), std::string::npos) << host;
    EXPECT_NE(text.find("set MASTER_ADDR to the one address"), std::string::npos) << text;
  }
}

TEST(ListenTcp, NamesAPortThatIsTaken) {
  const FileDescriptor first = listen_tcp("127.0.0.1", 0);
  const int port = ntohs(address_of(first).sin_port);
  const std::string text = failure("127.0.0.1", port);
  EXPECT_NE(text.find("127.0.0.1 port " + std::to_string(port)), std::string::npos) << text;
  EXPECT_NE(text.find("Address already in use"), std::string::npos) << text;
}

TEST(ListenTcp, NamesAnAddressOfAnotherMachine) {
  const std::string text = failure("192.0.2.1", 0);  // kept for documentation, so nobody's
  EXPECT_NE(text.find("192.0.2.1"), std::string::npos) << text;
  EXPECT_NE(text.find("must be an address of rank 0's machine"), std::string::npos) << text;
}

TEST(ListenTcp, NamesAHostThatCannotBeResolved) {
  const std::string text = failure("no..host", 0);
  EXPECT_NE(text.find("`no..host` cannot be resolved"), std::string::npos) << text;
}

TEST(AwaitListener, WaitsForOneThatComes) {
  FileDescriptor listener = listen_tcp("127.0.0.1", 0);
  const int port = ntohs(address_of(listener).sin_port);
  await_listener("127.0.0.1", port, Deadline(std::chrono::seconds(1)));
  listener.reset();
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    listener = listen_tcp("127.0.0.1", port);
  });
  await_listener("127.0.0.1", port, Deadline(std::chrono::seconds(10)));
  late.join();
}

TEST(AwaitListener, NamesWhereNobodyCameAndWhy) {
  FileDescriptor listener = listen_tcp("127.0.0.1", 0);
  const int port = ntohs(address_of(listener).sin_port);
  listener.reset();
  const auto text_of = [](const std::string& host, int where) -> std::string {
    try {
      await_listener(host, where, Deadline(std::chrono::milliseconds(50)));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(text_of("127.0.0.1", port),
            "nothing answers on 127.0.0.1 port " + std::to_string(port) + " (Connection refused)");
  EXPECT_NE(text_of("no..host", 1).find("cannot be resolved"), std::string::npos);
}

TEST(AddressTowards, IsTheOneThatPacketsLeaveBy) {
  EXPECT_EQ(address_towards("127.0.0.1", 9), "127.0.0.1");
  EXPECT_THROW(address_towards("no..host", 9), Error);
}

}  // namespace
}  // namespace lockstep
