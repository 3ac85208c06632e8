#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/torch.h>
#include <array>
#include <cerrno>
#include <functional>
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

void be_stranger(c10d::Store& store, pid_t rank_0, int64_t first_number) {
  std::vector<int> ports;
  for (const Deadline deadline{seconds(20)}; ports.empty() && !deadline.passed(); ports = listening_ports(rank_0))
    std::this_thread::sleep_for(milliseconds(1));
  ASSERT_EQ(ports.size(), 1U);
  std::vector<FileDescriptor> sockets;
  for (int64_t number = first_number; number < first_number + 8; ++number)
    sockets.push_back(connect_as(number, ports[0]));
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

// What the sum of both ranks' numbers came to: empty if it was right, else the error. A wrong sum is never one of them.
std::string sum_up(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  if (rank == 1) store->wait({"stranger is in"}, seconds(20));
  ::testing::internal::CaptureStderr();
  const auto engine = gloo_engine::make_backend(store, rank, 2, "127.0.0.1", seconds(20));
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (rank == 0) {
    EXPECT_NE(said.find("and is not a rank; the connection was shut down"), std::string::npos) << said;
  }
  torch::Tensor sum = torch::full({3}, rank + 1.0);
  std::vector<torch::Tensor> tensors{sum};
  try {
    engine->allreduce(tensors)->wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  EXPECT_TRUE(torch::equal(sum, torch::full({3}, 3.0)));
  return "";
}

using Errors = std::array<std::string, 2>;  // of ranks 0 and 1; empty where the sum was right

// Ranks 0 and 1 make an engine and sum up, while rank 2 connects to rank 0's port as eight numbers. Judges both ranks'
// errors.
void with_strangers(int64_t first_number, const std::function<void(const Errors& errors)>& judge) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "store").string();
  lockstep::testing::run_ranks(3, [&](Context& context) {
    const int64_t rank_0 = context.group().broadcast_object(int64_t{::getpid()}).toInt();
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 3);
    if (context.rank() == 2) be_stranger(*store, static_cast<pid_t>(rank_0), first_number);
    const std::string own = context.rank() == 2 ? "" : sum_up(store, static_cast<int>(context.rank()));
    const std::vector<std::string> errors = context.group().all_gather_bytes(own);
    judge({errors[0], errors[1]});
  });
}

TEST(Strangers, WithNumbersThatNoRankHasReadNothingAndDisturbNoSum) {
  with_strangers(1000, [](const Errors& errors) { EXPECT_EQ(errors[0] + errors[1], ""); });
}

// Gloo may have given the rank's place away before anybody can look. Then neither rank has a sum.
TEST(Strangers, ThatTakeARanksPlaceReadNothingAndAreNoSilentLoss) {
  with_strangers(0, [](const Errors& errors) {
    EXPECT_EQ(errors[0].empty(), errors[1].empty()) << errors[0] << "\n" << errors[1];
    for (const std::string& error : errors)
      EXPECT_TRUE(error.empty() || error.find("failed in operation 1, all_reduce(") != std::string::npos) << error;
  });
}

}  // namespace
}  // namespace lockstep
