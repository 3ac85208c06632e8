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
  with_group(3, [](Group& group) {
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{4080}, size_t{4096}, size_t{4097}, size_t{100000}}) {
      std::vector<Bytes> in, out;
      std::vector<CompletionPtr> work;
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
  with_group(2, [](Group& group) {
    constexpr size_t kBytes = 10000;  // more than the channel holds
    if (group.rank() == 0) {
      std::vector<CompletionPtr> work;
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
  with_group(4, [](Group& group) {
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
  with_group(2, [](Group& group) {
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
  with_group(2, [](Group& group) {
    std::vector<std::byte> data(20000);
    const bool sender = group.rank() == 0;
    auto work = sender ? group.send(data.data(), 20000, 1, 4) : CompletionPtr(group.receive(data.data(), 8, 0, 4));
    try {
      group.wait(*work, kTestTimeout);
      FAIL() << "rank " << group.rank();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("8 bytes expected, 20000 sent (tag 4)"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace lockstep::shm
