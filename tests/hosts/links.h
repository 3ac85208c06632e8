#pragma once

#include "hosts/link_process.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "base/clock.h"
#include "base/socket.h"
#include "hosts/addresses.h"

// Link processes of one machine pass for several machines: each has its own loopback addresses for all, so what the one
// listens on for the other's ranks does not collide with the other's ranks.

namespace lockstep::hosts {

using std::chrono::milliseconds;

constexpr uint32_t kOfA = 0x7fa10001, kOfB = 0x7fa20001;  // 127.161.0.1 and 127.162.0.1

class Links : public ::testing::Test {
 protected:
  // Before any thread.
  LinkProcess a_{key_, "127.0.0.1", 0}, b_{key_, "127.0.0.1", 0};

  void begin(int port_of_b = 0, uint32_t start_of_b = 0) {
    const LinkPeer a{"anna", "127.0.0.1", a_.port()}, b{"bert", "127.0.0.1", port_of_b > 0 ? port_of_b : b_.port()};
    a_.begin({kOfA, 0, {a, b}});
    b_.begin({kOfB, 1, {a, b}, start_of_b});
  }
  /// A rank of machine B listens, and A's ranks can connect.
  uint16_t rank_of_b() {
    rank_ = listen_on(LinkAddresses(kOfB, 2).text_of(1), 0);
    const auto port = static_cast<uint16_t>(rank_.endpoint.port);
    a_.open({1, port});
    return port;
  }
  /// A rank of A connects.
  static FileDescriptor connect(uint16_t port) {
    std::string why;
    return connect_to({LinkAddresses(kOfA, 2).text_of(1), port}, Deadline(milliseconds(2000)), why);
  }
  FileDescriptor accepted(std::string* from = nullptr, uint16_t* from_port = nullptr) const {
    pollfd polled{rank_.socket.get(), POLLIN, 0};
    ::poll(&polled, 1, 5000);
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    FileDescriptor socket(::accept4(rank_.socket.get(), reinterpret_cast<sockaddr*>(&peer), &length, SOCK_CLOEXEC));
    char text[INET_ADDRSTRLEN];
    if (from != nullptr) *from = ::inet_ntop(AF_INET, &peer.sin_addr, text, sizeof text);
    if (from_port != nullptr) *from_port = ntohs(peer.sin_port);
    return socket;
  }
  /// 0: the kernel does not tell.
  static pid_t process_of_a() {
    std::ifstream children("/proc/self/task/" + std::to_string(::getpid()) + "/children");
    pid_t process = 0;
    children >> process;
    return process;
  }
  static void say(const FileDescriptor& socket, const std::string& text) {
    send_all(socket.get(), text.data(), text.size(), Deadline(milliseconds(10000)));
  }
  static std::string hear(const FileDescriptor& socket, size_t bytes) {
    std::string text(bytes, '\0');
    receive_all(socket.get(), text.data(), bytes, Deadline(milliseconds(10000)));
    return text;
  }
  static std::string news_of(LinkProcess& links) {
    std::string all;
    for (const Deadline deadline(milliseconds(8000)); all.empty() && !deadline.passed();) {
      pollfd polled{links.fd(), POLLIN, 0};
      ::poll(&polled, 1, 100);
      for (const LinkNews& news : links.take_news()) all += (news.is_failure ? "could not " : "") + news.text + "\n";
    }
    return all;
  }

  static inline const Key key_ = Key::generate();
  Listener rank_;
};

}  // namespace lockstep::hosts
