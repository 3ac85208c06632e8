#include <gtest/gtest.h>

#include <array>
#include <random>
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

TEST(Messages, ThatNobodyHasReceivedAreWaitedForByARankThatFinishes) {
  with_group(2, [](Communicator& group) {
    std::vector<std::byte> data(5'000'000, std::byte{7});
    if (group.rank() == 0) {
      group.send(data.data(), data.size(), 1, 4);
      EXPECT_EQ(group.finish(Deadline(std::chrono::seconds(5))), "");
      group.leave();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      std::vector<std::byte> received(data.size());
      const auto work = group.receive(received.data(), received.size(), 0, 4);
      group.wait(*work, kTestTimeout);
      EXPECT_EQ(received, data);
    }
  });
}

TEST(Messages, OfWhichOnlyAPartHasComeAreTold) {
  with_group(2, [](Communicator& group) {
    std::vector<std::byte> data(1 << 20);
    if (group.rank() == 0) {
      group.send(data.data(), data.size(), 1, 4);
      group.leave();
      return;
    }
    try {
      const auto work = group.receive(data.data(), data.size(), 0, 4);
      group.wait(*work, kTestTimeout);
      FAIL();
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("had sent rank 1 only "), std::string::npos) << text;
      EXPECT_NE(text.find(" of 1048576 bytes of a message with tag 4 by then."), std::string::npos) << text;
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

/// send() and wait(), by the short way where it is open.
void send_now(Communicator& group, const Bytes& data, int to, int64_t tag) {
  const WorkPtr sent = group.send_at_once(data.data(), data.size(), to, tag, DataType::kUInt8);
  if (sent != nullptr) group.wait(*sent, kTestTimeout);
}
int receive_now(Communicator& group, Bytes& data, int from, int64_t tag) {
  return group.receive_now(data.data(), data.size(), from, tag, DataType::kUInt8, kTestTimeout);
}

TEST(Messages, BlockingOnesOfEverySizeGoBackAndForth) {
  with_group(3, [](Communicator& group) {
    const int to = (group.rank() + 1) % 3, from = (group.rank() + 2) % 3;
    for (int turn = 0; turn < 60; ++turn) {
      const size_t sizes[] = {0, 1, 33, 1056, 1057, 1070, 4080, 4096, 100000};
      const size_t bytes = sizes[(turn * 7 + turn / 9) % 9];
      Bytes in(bytes);
      if (group.rank() == 0) send_now(group, pattern(bytes, 0, turn), to, turn % 2);
      ASSERT_EQ(receive_now(group, in, from, turn % 2), from);
      ASSERT_EQ(in, pattern(bytes, from, turn));
      if (group.rank() != 0) send_now(group, pattern(bytes, group.rank(), turn), to, turn % 2);
    }
  });
}

TEST(Messages, AreReceivedInOrderWhateverWayEachTakes) {
  // A message that finds its box in use, or does not fit into one, takes the stream, between others that do not.
  with_group(2, [](Communicator& group) {
    const auto size = [](int i) { return static_cast<size_t>(i % 5 == 3 ? 1500 : i % 7 * 10); };
    std::vector<Bytes> data(200);
    std::vector<WorkPtr> work;
    for (int i = 0; i < 200; ++i) {
      Bytes& one = data[static_cast<size_t>(i)];
      one = group.rank() == 0 ? pattern(size(i), i, 0) : Bytes(size(i));
      const bool other_call = i % 11 < 4;
      if (group.rank() == 0 && other_call)
        send_now(group, one, 1, 3);
      else if (group.rank() == 0)
        work.push_back(group.send(one.data(), one.size(), 1, 3));
      else if (other_call)
        receive_now(group, one, 0, 3);
      else
        work.push_back(group.receive(one.data(), one.size(), 0, 3));
    }
    for (auto& w : work) group.wait(*w, kTestTimeout);
    for (int i = 0; i < 200; ++i) ASSERT_EQ(data[static_cast<size_t>(i)], pattern(size(i), i, 0)) << i;
  });
}

/// With cells of so many bytes, and so many of them.
class Streams : public ::testing::TestWithParam<std::pair<size_t, size_t>> {
 protected:
  static Geometry geometry() {
    Geometry geometry = small_geometry(2);
    geometry.cell_bytes = GetParam().first;
    geometry.channel_bytes = GetParam().first * GetParam().second;
    return geometry;
  }
};

TEST_P(Streams, HaveTheSameBytesHoweverFarTheReceiverLags) {
  with_group(
      2,
      [](Communicator& group) {
        std::mt19937 random(7);  // the same on both ranks
        const auto below = [&](unsigned n) { return static_cast<size_t>(random() % n); };
        for (int burst = 0; burst < 300; ++burst) {
          std::vector<Bytes> data(1 + below(12));
          const unsigned largest = std::array{200u, 3000u, 30000u}[below(3)];
          const bool lags = below(2) == 0, blocks = below(2) == 0;
          for (auto& one : data) one.resize(1041 + below(largest));  // more than a box holds
          std::vector<WorkPtr> work;
          if (group.rank() == 0) {
            for (size_t i = 0; i < data.size(); ++i) {
              data[i] = pattern(data[i].size(), burst, static_cast<int64_t>(i));
              if (blocks && !lags)
                send_now(group, data[i], 1, 0);
              else
                work.push_back(group.send(data[i].data(), data[i].size(), 1, 0));
            }
            if (lags) group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
          } else {
            if (lags) group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
            for (auto& one : data) {
              if (blocks)
                receive_now(group, one, 0, 0);
              else
                work.push_back(group.receive(one.data(), one.size(), 0, 0));
            }
          }
          for (auto& w : work) group.wait(*w, kTestTimeout);
          for (size_t i = 0; i < data.size(); ++i)
            ASSERT_EQ(data[i], pattern(data[i].size(), burst, static_cast<int64_t>(i))) << burst << " " << i;
        }
      },
      geometry());
}

// Cells change hands: what a rank has read, it writes to next. Both send at once, or answer, or only one sends.
TEST_P(Streams, HaveTheSameBytesInBothDirections) {
  with_group(
      2,
      [](Communicator& group) {
        std::mt19937 random(11);  // the same on both ranks
        const auto below = [&](unsigned n) { return static_cast<size_t>(random() % n); };
        const int mine = group.rank(), other = 1 - mine;
        for (int burst = 0; burst < 200; ++burst) {
          const unsigned largest = std::array{200u, 3000u, 100000u}[below(3)];
          const size_t way = below(4);
          const int first = static_cast<int>(below(2));
          const std::vector<size_t> sizes{1041 + below(largest), 1041 + below(largest)};
          for (int turn = 0; turn < static_cast<int>(1 + below(6)); ++turn) {
            const Bytes out = pattern(sizes[static_cast<size_t>(mine)], mine, burst + turn);
            Bytes in(sizes[static_cast<size_t>(other)]);
            const bool sends = way != 0 || mine == first, receives = way != 0 || mine != first;
            WorkPtr sent;
            if (way == 1 && sends) sent = group.send(out.data(), out.size(), other, 0);
            if (way != 1 && sends && (mine == first || !receives)) send_now(group, out, other, 0);
            if (receives) receive_now(group, in, other, 0);
            if (way != 1 && sends && receives && mine != first) send_now(group, out, other, 0);
            if (sent) group.wait(*sent, kTestTimeout);
            if (!receives) continue;
            ASSERT_EQ(in, pattern(in.size(), other, burst + turn)) << burst << " " << turn;
          }
        }
      },
      geometry());
}

INSTANTIATE_TEST_SUITE_P(Cells, Streams,
                         ::testing::Values(std::pair{64, 4}, std::pair{64, 10}, std::pair{192, 16}, std::pair{512, 8},
                                           std::pair{512, 256}, std::pair{4096, 32}, std::pair{8192, 9}));

TEST(Messages, ManySmallOnesNeedNoReceiver) {
  // As many as are in flight, each with its envelope; the boxes come on top.
  with_group(2, [](Communicator& group) {
    const int kCount = static_cast<int>(Cells::most_in_flight(small_geometry(2)) / (16 + 4) + kBoxes);
    const Bytes sent = pattern(4, 1, 1);
    for (int i = 0; i < kCount; ++i)
      ASSERT_EQ(group.send_at_once(sent.data(), 4, 1 - group.rank(), 1, DataType::kUInt8), nullptr) << i;
    const WorkPtr last = group.send_at_once(sent.data(), 4, 1 - group.rank(), 1, DataType::kUInt8);
    ASSERT_NE(last, nullptr);
    group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
    for (int i = 0; i <= kCount; ++i) {
      Bytes in(4);
      receive_now(group, in, 1 - group.rank(), 1);
      ASSERT_EQ(in, sent);
    }
    group.wait(*last, kTestTimeout);
  });
}

TEST(Messages, ABlockingReceiveLeavesWhatIsNotForIt) {
  with_group(2, [](Communicator& group) {
    const Bytes small = pattern(8, 0, 1), large = pattern(3000, 0, 2);
    if (group.rank() == 0) {
      send_now(group, small, 1, 1);
      send_now(group, large, 1, 2);
      send_now(group, small, 1, 3);
      send_now(group, large, 1, 4);
    } else {
      Bytes in(8), many(3000);
      receive_now(group, in, 0, 3);
      EXPECT_EQ(in, small);
      receive_now(group, many, 0, 2);
      EXPECT_EQ(many, large);
      EXPECT_EQ(receive_now(group, in, kAnySource, 1), 0);
      EXPECT_EQ(in, small);
      receive_now(group, many, 0, 4);
      EXPECT_EQ(many, large);
    }
  });
}

TEST(Messages, ABlockingReceiveOfAnotherSizeIsRefusedOnBothSides) {
  for (const size_t sent : {size_t{16}, size_t{2000}})
    with_group(2, [&](Communicator& group) {
      Bytes data(sent);
      try {
        if (group.rank() == 0) {
          send_now(group, data, 1, 4);
          group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
        } else {
          Bytes in(8);
          receive_now(group, in, 0, 4);
        }
        FAIL() << "rank " << group.rank();
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what())
                      .find(std::to_string(sent) + " elements of uint8 sent, 8 of uint8 expected (tag 4)"),
                  std::string::npos)
            << error.what();
      }
    });
}

}  // namespace
}  // namespace lockstep::shm
