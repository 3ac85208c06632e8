#include "collectives/shm/segment/pass_descriptor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>

#include "base/error.h"
#include "base/shared_segment.h"

namespace lockstep {
namespace {

TEST(PassDescriptor, ArrivesWithItsMessage) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  FileDescriptor a(ends[0]), b(ends[1]);
  const Deadline deadline(std::chrono::seconds(5));
  SharedSegment segment("test", 4096, 4096);
  segment.data()[5] = std::byte{42};
  std::array<std::byte, 4> message{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}}, got{};
  send_descriptor(a.get(), message, segment.fd(), deadline);
  SharedSegment peer(receive_descriptor(b.get(), got, deadline), 4096);
  EXPECT_EQ(got, message);
  EXPECT_EQ(peer.data()[5], std::byte{42});
  EXPECT_THROW(receive_descriptor(b.get(), got, Deadline(std::chrono::milliseconds(20))), Error);
  a.reset();
  EXPECT_THROW(receive_descriptor(b.get(), got, deadline), Error);
}

}  // namespace
}  // namespace lockstep
