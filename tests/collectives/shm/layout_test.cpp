#include "collectives/shm/segment/layout.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <atomic>

#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/protocol/request.h"
#include "collectives/shm/reference.h"
#include "collectives/shm/segment/bootstrap.h"

// Groups that have worked for years: every word starts shortly before the number at which it, or a part of it, would
// overflow.
namespace lockstep::shm {
namespace {

constexpr uint64_t power(int exponent) { return uint64_t{1} << exponent; }

/// The in-place sum over all ranks of `count` integers.
void check_all_reduce(Communicator& group, int64_t* values, size_t count, int64_t turn) {
  const int64_t n = group.size();
  for (size_t k = 0; k < count; ++k) values[k] = turn * group.rank() + static_cast<int64_t>(k);
  group.run(
      {.kind = OperationKind::kAllReduce, .type = DataType::kInt64, .count = count, .input = values, .output = values},
      kTestTimeout);
  for (size_t k = 0; k < count; ++k)
    ASSERT_EQ(values[k], turn * n * (n - 1) / 2 + n * static_cast<int64_t>(k)) << k << " of " << count;
}

int64_t element(int from, int to, size_t k) { return 1000 * from + 100 * to + static_cast<int64_t>(k % 97); }

/// Blocks of different sizes, so that every rank takes a different number of rounds, and some none.
void check_uneven(Communicator& group) {
  const int n = group.size(), me = group.rank();
  const auto count = [](int from, int to) { return static_cast<size_t>((from * 3 + to) % 4) * 2500; };
  Request request{.kind = OperationKind::kAllToAllUneven, .type = DataType::kInt64};
  std::vector<int64_t> in, expected;
  for (int r = 0; r < n; ++r) {
    request.make_pieces().send_counts.push_back(count(me, r));
    request.make_pieces().receive_counts.push_back(count(r, me));
    for (size_t k = 0; k < count(me, r); ++k) in.push_back(element(me, r, k));
    for (size_t k = 0; k < count(r, me); ++k) expected.push_back(element(r, me, k));
  }
  std::vector<int64_t> out(expected.size());
  request.input = in.data();
  request.output = out.data();
  group.run(Request(request), kTestTimeout);
  ASSERT_EQ(out, expected);
}

void check_broadcast(Communicator& group, int root, size_t count) {
  std::vector<int64_t> values(count, group.rank() == root ? 17 + root : -1);
  group.run({.kind = OperationKind::kBroadcast,
             .type = DataType::kInt64,
             .root = root,
             .count = count,
             .input = values.data(),
             .output = values.data()},
            kTestTimeout);
  for (int64_t x : values) ASSERT_EQ(x, 17 + root);
}

/// A message, larger than the channel, to the next rank and from the one before.
void check_messages(Communicator& group, size_t bytes) {
  const int n = group.size(), to = (group.rank() + 1) % n, from = (group.rank() + n - 1) % n;
  const auto data = [&](int sender) {
    std::vector<uint8_t> all(bytes);
    for (size_t i = 0; i < bytes; ++i) all[i] = static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(sender));
    return all;
  };
  const auto out = data(group.rank());
  std::vector<uint8_t> in(bytes);
  auto sent = group.send(out.data(), bytes, to, 5);
  group.wait(*group.receive(in.data(), bytes, from, 5), kTestTimeout);
  group.wait(*sent, kTestTimeout);
  ASSERT_EQ(in, data(from));
}

/// Every method, with few and with many operations in flight, reusing lines and chunks.
void check_everything(Communicator& group, int turns) {
  std::vector<int64_t> memory(20000);
  auto* resident = reinterpret_cast<int64_t*>(group.allocate(20000 * sizeof(int64_t)));
  for (int64_t turn = 0; turn < turns; ++turn) {
    check_all_reduce(group, memory.data(), 3, turn);      // inside the line
    check_all_reduce(group, memory.data(), 500, turn);    // beside it
    check_all_reduce(group, memory.data(), 20000, turn);  // in rounds
    check_all_reduce(group, resident, 20000, turn);       // in place
    check_broadcast(group, static_cast<int>(turn) % group.size(), 12000);
    check_uneven(group);
    check_messages(group, 9999);
  }
  std::array<int64_t, 70> ones;
  ones.fill(1);
  std::vector<WorkPtr> work;
  for (int64_t& one : ones)
    work.push_back(group.start(
        {.kind = OperationKind::kAllReduce, .type = DataType::kInt64, .count = 1, .input = &one, .output = &one}));
  for (auto& w : work) group.wait(*w, kTestTimeout);
  for (int64_t sum : ones) ASSERT_EQ(sum, group.size());
  group.free(resident);
}

Request broadcast(Bytes& data) {
  return {.kind = OperationKind::kBroadcast,
          .type = DataType::kUInt8,
          .count = data.size(),
          .input = data.data(),
          .output = data.data()};
}

struct Case {
  const char* name;
  Beginning beginning;
};

class FarOn : public ::testing::TestWithParam<std::tuple<int, Case>> {};

// After 2^36 operations (2.3 hours at 0.12 us) the words that said how far a rank had come wrapped to 0, and results
// were wrong without an error.
TEST_P(FarOn, NothingIsDifferent) {
  const auto& [ranks, limit] = GetParam();
  Geometry geometry = small_geometry(ranks);
  geometry.channel_bytes = 3 * 1024;
  geometry.cell_bytes = 192;  // not a power of two: 2^64 is not a multiple of it
  with_group(
      ranks, [](Communicator& group) { check_everything(group, 6); }, geometry, limit.beginning);
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, FarOn,
    ::testing::Combine(::testing::Values(2, 3),
                       ::testing::Values(Case{"operations_2_36", {.operations = power(36) - 10}},
                                         Case{"operations_2_32", {.operations = power(32) - 10}},
                                         Case{"operations_2_40", {.operations = power(40) - 10}},
                                         Case{"operations_the_last", {.operations = kLastOperation - 200}},
                                         Case{"rounds_2_28", {.rounds = power(28) - 10}},
                                         Case{"rounds_2_63", {.rounds = power(63) - 10}},
                                         Case{"rounds_2_64", {.rounds = 0 - uint64_t{10}}},
                                         Case{"bytes_2_32", {.message_bytes = power(32) - 10000}},
                                         Case{"bytes_2_63", {.message_bytes = power(63) - 10000}},
                                         Case{"bytes_2_64", {.message_bytes = 0 - uint64_t{10000}}},
                                         Case{"all", {power(36) - 10, 0 - uint64_t{10}, 0 - uint64_t{10000}}})),
    [](const auto& at) {
      return std::string(std::get<1>(at.param).name) + "_" + std::to_string(std::get<0>(at.param)) + "_ranks";
    });

// Groups are made often, and most never send anything large.
TEST(Memory, OfRoundsAndMessagesIsCommittedWhenTheyNeedIt) {
  for (int ranks : {2, 8}) {
    Geometry geometry = geometry_for(ranks);
    geometry.resident_bytes = size_t{1} << 20;
    EXPECT_LE(geometry.resident_at(), size_t{3} << 20);
    with_group(
        ranks,
        [](Communicator& group) {
          const auto committed = [&] {
            struct stat status {};
            EXPECT_EQ(::fstat(group.world().segment(group.rank())->fd(), &status), 0);
            return static_cast<size_t>(status.st_blocks) * 512;
          };
          const Geometry& sizes = group.world().geometry();
          Bytes small(8), medium(10'000), large(100'000);
          group.run(broadcast(small), kTestTimeout);
          size_t expected = sizes.resident_at();
          EXPECT_EQ(committed(), expected);
          // Of the rank that gives; the others only read.
          group.run(broadcast(medium), kTestTimeout);
          if (group.rank() == 0 && group.world().spin()) expected += sizes.cold_bytes;
          EXPECT_EQ(committed(), expected);
          group.run(broadcast(large), kTestTimeout);
          if (group.rank() == 0) expected += sizes.area_bytes;
          EXPECT_EQ(committed(), expected);
          const int peer = group.rank() ^ 1;
          const auto exchange = [&](Bytes& data) {
            Bytes in(data.size());
            auto sent = group.send(data.data(), data.size(), peer, 1);
            group.wait(*group.receive(in.data(), in.size(), peer, 1), kTestTimeout);
            group.wait(*sent, kTestTimeout);
          };
          exchange(small);
          EXPECT_EQ(committed(), expected);
          for (int i = 0; i < 2; ++i) exchange(large);
          EXPECT_EQ(committed(), expected + sizes.channel_bytes);
        },
        geometry);
  }
}

class LastOperation : public ::testing::TestWithParam<int> {};

std::string text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_P(LastOperation, IsFollowedByAClearErrorOnEveryRank) {
  const int n = GetParam();
  with_group(n,
             [&](Communicator& group) {
               int64_t x[3] = {};
               for (int turn = 0; turn < 3; ++turn) check_all_reduce(group, x, 3, turn);
               for (int again = 0; again < 2; ++again) {
                 const std::string text = text_of([&] { group.run({.kind = OperationKind::kBarrier}, kTestTimeout); });
                 EXPECT_NE(text.find("rank " + std::to_string(group.rank()) + ": this group has carried out " +
                                     std::to_string(kLastOperation) + " operations"),
                           std::string::npos)
                     << text;
                 EXPECT_EQ(text_of([&] { group.start({.kind = OperationKind::kBarrier}); }), text);
               }
               check_messages(group, 5000);  // are not counted as operations
             },
             small_geometry(n), {.operations = kLastOperation - 3});
}

// A verdict had 40 bits for the operation's number, and named the wrong one after 2^40.
TEST_P(LastOperation, NumbersAreTrueInVerdicts) {
  const int n = GetParam();
  const std::string number = std::to_string(power(40) + 6);
  with_group(n,
             [&](Communicator& group) {
               group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
               int64_t x[2] = {};
               Request request{
                   .kind = OperationKind::kAllReduce, .type = DataType::kInt64, .count = 1, .input = x, .output = x};
               if (group.rank() == n - 1) request.count = 2;
               const std::string text = text_of([&] { group.run(Request(request), kTestTimeout); });
               EXPECT_NE(text.find("ranks disagree on operation " + number + ":"), std::string::npos) << text;
               // Later events must not change what this rank left for the others to read.
               group.abort("too late");
               EXPECT_EQ(text_of([&] { group.run({.kind = OperationKind::kBarrier}, kTestTimeout); }), text);
             },
             small_geometry(n), {.operations = power(40) + 4});
  std::atomic<int> failed{0};
  with_group(n,
             [&](Communicator& group) {
               if (group.rank() == 0) {
                 while (failed.load() < n - 1) std::this_thread::yield();
                 return;
               }
               const std::string text =
                   text_of([&] { group.run({.kind = OperationKind::kBarrier}, std::chrono::milliseconds(100)); });
               failed.fetch_add(1);
               EXPECT_NE(text.find("operation " + std::to_string(power(40) + 5) + ", barrier()"), std::string::npos)
                   << text;
             },
             small_geometry(n), {.operations = power(40) + 4});
}

// Offsets of blocks are computed in 64 bits: counts that do not fit must not wrap to small ones.
TEST(LastOperation, CountsBeyondMeasureAreRefused) {
  with_group(2, [](Communicator& group) {
    Request request{.kind = OperationKind::kAllToAllUneven, .type = DataType::kInt64};
    request.make_pieces().send_counts = {1, power(61) + 1};
    request.make_pieces().receive_counts = {1, 1};
    EXPECT_NE(text_of([&] { group.start(request); }).find("too many elements for one rank"), std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LastOperation, ::testing::Values(2, 3));

TEST(Names, OfADtypeOrReductionThatThereIsNotAreWordsToo) {
  EXPECT_STREQ(name(DataType::kOther), "bytes of another dtype");
  EXPECT_STREQ(name(static_cast<DataType>(kMovedDataTypes)), "an unknown dtype");
  EXPECT_STREQ(name(static_cast<DataType>(255)), "an unknown dtype");
  EXPECT_STREQ(name(ReduceOp::kPremulSum), "premul_sum");
  EXPECT_STREQ(name(static_cast<ReduceOp>(255)), "an unknown op");
  Header damaged(~uint64_t{0});
  EXPECT_NE(damaged.text(), "");
}

}  // namespace
}  // namespace lockstep::shm
