#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/torch.h>
#include <cerrno>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "collectives/gloo/gloo_backend.h"
#include "support/listening_ports.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// A stranger that takes a rank's place at Gloo's port: Gloo tells those that connect apart by eight bytes, which count
// from 0.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

FileDescriptor connect_as(int64_t number, int port) {
  sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::send(socket.get(), &number, sizeof number, MSG_NOSIGNAL), ssize_t{sizeof number});
  return socket;
}

void be_stranger(c10d::Store& store, pid_t rank_0) {
  std::vector<int> ports;
  for (const Deadline deadline{seconds(20)}; ports.empty() && !deadline.passed(); ports = listening_ports(rank_0))
    std::this_thread::sleep_for(milliseconds(1));
  ASSERT_EQ(ports.size(), 1U);
  std::vector<FileDescriptor> sockets;
  for (int64_t number = 0; number < 8; ++number) sockets.push_back(connect_as(number, ports[0]));
  store.set("stranger is in", std::string("1"));
  for (const FileDescriptor& socket : sockets) {
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    char byte;
    errno = 0;
    EXPECT_LE(::recv(socket.get(), &byte, 1, 0), 0) << "it reads what is meant for a rank";
    EXPECT_NE(errno, EAGAIN) << "it is still connected";
  }
}

void be_rank(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  if (rank == 1) store->wait({"stranger is in"}, seconds(20));
  ::testing::internal::CaptureStderr();
  const auto engine = gloo_engine::make_backend(store, rank, 2, "127.0.0.1", seconds(20));
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (rank == 0) {
    EXPECT_NE(said.find("and is no rank; it was shut down"), std::string::npos) << said;
  }
  torch::Tensor sum = torch::full({3}, rank + 1.0);
  std::vector<torch::Tensor> tensors{sum};
  try {
    engine->allreduce(tensors)->wait();
    EXPECT_TRUE(torch::equal(sum, torch::full({3}, 3.0)));
  } catch (const std::exception&) {
    // A stranger had rank 1's place.
  }
}

TEST(Strangers, AtTheDataPortReadNothingAndDisturbNoSum) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "store").string();
  lockstep::testing::run_ranks(3, [&](Context& context) {
    const int64_t rank_0 = context.group().broadcast_object(int64_t{::getpid()}).toInt();
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 3);
    if (context.rank() == 2)
      be_stranger(*store, static_cast<pid_t>(rank_0));
    else
      be_rank(store, static_cast<int>(context.rank()));
  });
}

}  // namespace
}  // namespace lockstep
