#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/reference.h"

namespace lockstep::shm {
namespace {

Bytes pattern(size_t bytes, int from, int64_t tag) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 13 + static_cast<size_t>(from * 7 + tag));
  return data;
}

TEST(Messages, EverySizeBetweenEveryPair) {
  with_group(3, [](Communicator& group) {
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{4080}, size_t{4096}, size_t{4097}, size_t{100000}}) {
      std::vector<Bytes> in, out;
      std::vector<WorkPtr> work;
      for (int peer = 0; peer < 3; ++peer) {
        in.emplace_back(bytes);
        out.push_back(pattern(bytes, group.rank(), peer));
      }
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == group.rank()) continue;
        work.push_back(group.send(out[static_cast<size_t>(peer)].data(), bytes, peer, 1));
        work.push_back(group.receive(in[static_cast<size_t>(peer)].data(), bytes, peer, 1));
      }
      for (auto& w : work) group.wait(*w, kTestTimeout);
      for (int peer = 0; peer < 3; ++peer)
        ASSERT_TRUE(peer == group.rank() || in[static_cast<size_t>(peer)] == pattern(bytes, peer, group.rank()));
    }
  });
}

TEST(Messages, TagsSelectAndOrderHoldsWithinATag) {
  with_group(2, [](Communicator& group) {
    constexpr size_t kBytes = 10000;  // more than the channel holds
    if (group.rank() == 0) {
      std::vector<WorkPtr> work;
      std::vector<Bytes> data;
      for (int i = 0; i < 6; ++i) data.push_back(pattern(kBytes, i, 0));
      for (int i = 0; i < 6; ++i) work.push_back(group.send(data[static_cast<size_t>(i)].data(), kBytes, 1, i % 2));
      for (auto& w : work) group.wait(*w, kTestTimeout);
    } else {
      for (int i : {1, 3, 0, 5, 2, 4}) {
        Bytes got(kBytes);
        group.wait(*group.receive(got.data(), kBytes, 0, i % 2), kTestTimeout);
        ASSERT_EQ(got, pattern(kBytes, i, 0)) << i;
      }
    }
  });
}

TEST(Messages, AnySourceTellsWhoItWas) {
  with_group(4, [](Communicator& group) {
    if (group.rank() == 0) {
      std::multiset<int> seen;
      for (int i = 0; i < 9; ++i) {
        int got = -1;
        auto message = group.receive(&got, sizeof got, kAnySource, 9);
        group.wait(*message, kTestTimeout);
        ASSERT_EQ(got, message->source() * 100);
        seen.insert(message->source());
      }
      EXPECT_EQ(seen, (std::multiset<int>{1, 1, 1, 2, 2, 2, 3, 3, 3}));
    } else {
      for (int i = 0; i < 3; ++i) {
        const int value = group.rank() * 100;
        group.wait(*group.send(&value, sizeof value, 0, 9), kTestTimeout);
      }
    }
  });
}

TEST(Messages, LargeOnesCrossWhileACollectiveRuns) {
  with_group(2, [](Communicator& group) {
    Bytes out = pattern(300000, group.rank(), 2), in(out.size());
    auto send = group.send(out.data(), out.size(), 1 - group.rank(), 2);
    auto receive = group.receive(in.data(), in.size(), 1 - group.rank(), 2);
    std::vector<int64_t> x(100000, group.rank());
    group.run({.kind = OperationKind::kAllReduce,
               .type = DataType::kInt64,
               .count = x.size(),
               .input = x.data(),
               .output = x.data()},
              kTestTimeout);
    EXPECT_EQ(x.back(), 1);
    group.wait(*send, kTestTimeout);
    group.wait(*receive, kTestTimeout);
    EXPECT_EQ(in, pattern(out.size(), 1 - group.rank(), 2));
  });
}

TEST(Messages, AWrongSizeIsRefusedOnBothSides) {
  with_group(2, [](Communicator& group) {
    std::vector<std::byte> data(20000);
    const bool sender = group.rank() == 0;
    auto work = sender ? group.send(data.data(), 20000, 1, 4) : WorkPtr(group.receive(data.data(), 8, 0, 4));
    try {
      group.wait(*work, kTestTimeout);
      FAIL() << "rank " << group.rank();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("20000 elements of uint8 sent, 8 of uint8 expected (tag 4)"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(Messages, AnotherTypeIsRefusedOnBothSides) {
  // When it arrives, and after it was set aside for a message with another tag.
  for (bool late : {false, true})
    with_group(2, [&](Communicator& group) {
      std::vector<std::byte> data(16);
      try {
        if (group.rank() == 0) {
          const auto first = group.send(data.data(), 16, 1, 4, nullptr, DataType::kFloat32);
          if (late) group.wait(*group.send(data.data(), 1, 1, 5), kTestTimeout);
          // Done as soon as it is in the channel; this rank learns of it when it waits for something else.
          group.wait(*first, kTestTimeout);
          group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
        } else {
          if (late) group.wait(*group.receive(data.data(), 1, 0, 5), kTestTimeout);
          group.wait(*group.receive(data.data(), 16, 0, 4, nullptr, DataType::kInt32), kTestTimeout);
        }
        FAIL() << "rank " << group.rank();
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(),
                     "rank 1 received a message from rank 0 into a buffer of another dtype or size: 4 elements of "
                     "float32 sent, 4 of int32 expected (tag 4)");
      }
    });
}

}  // namespace
}  // namespace lockstep::shm
