#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/protocol/wait_policy.h"
#include "collectives/shm/reference.h"

// Everything but all_reduce: what every rank must hold afterwards follows from a formula for byte i of the block that
// rank `from` gives rank `to`.
namespace lockstep::shm {
namespace {

std::byte value(int from, int to, size_t i) {
  return static_cast<std::byte>(i * 7 + static_cast<size_t>(from) * 31 + static_cast<size_t>(to) * 101 + (i >> 8));
}

Bytes block(int from, int to, size_t bytes) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = value(from, to, i);
  return data;
}

/// Contiguous blocks in private or resident memory, or separate blocks where a list asks for them.
class Buffer {
 public:
  Buffer(Communicator& group, size_t bytes, bool resident) : group_(group), bytes_(bytes) {
    private_.resize(resident ? 0 : bytes + 1);
    data_ = resident ? group.allocate(bytes + 1) : private_.data();
    std::fill(data_, data_ + bytes, std::byte{0xee});
    resident_ = resident;
  }
  ~Buffer() {
    if (resident_) group_.free(data_);
  }
  std::byte* data() { return data_; }
  void fill(size_t at, const Bytes& bytes) { std::copy(bytes.begin(), bytes.end(), data_ + at); }
  bool holds(size_t at, const Bytes& bytes) const { return std::equal(bytes.begin(), bytes.end(), data_ + at); }
  bool untouched() const {
    return std::all_of(data_, data_ + bytes_, [](std::byte b) { return b == std::byte{0xee}; });
  }

 private:
  Communicator& group_;
  size_t bytes_;
  bool resident_;
  Bytes private_;
  std::byte* data_;
};

struct Case {
  size_t bytes;
  bool resident;
  bool lists;
};

std::vector<Case> cases(int ranks) {
  const Geometry geometry = small_geometry(ranks);
  const auto n = static_cast<size_t>(ranks);
  const size_t one_way = Limits::of(ranks).one_way, both_ways = Limits::of(ranks).both_ways;
  const size_t round = geometry.chunk_bytes / n / kCacheLine * kCacheLine;
  std::vector<size_t> sizes{
      0, 1, kInlineBytes / n - 1, kInlineBytes / n, kInlineBytes / n + 1, kInlineBytes, kInlineBytes + 1, 2000};
  for (size_t threshold : {one_way / n, one_way, both_ways / n, both_ways, 3 * round,
                           geometry.chunks * geometry.chunk_bytes + 64, geometry.area_bytes + 64})
    for (size_t delta : {size_t{0}, size_t{1}, size_t{2}}) sizes.push_back(threshold + delta - 1);
  std::vector<Case> all;
  for (size_t bytes : sizes)
    for (bool resident : {false, true})
      for (bool lists : {false, true}) all.push_back({bytes, resident, lists});
  return all;
}

template <typename Pointer>
std::vector<Pointer> pointers(std::byte* data, size_t bytes, int n) {
  std::vector<Pointer> list;
  for (int r = 0; r < n; ++r) list.push_back(data + static_cast<size_t>(r) * bytes);
  return list;
}

Request request(OperationKind kind, size_t count, int root, const void* input, void* output) {
  return {.kind = kind, .type = DataType::kUInt8, .root = root, .count = count, .input = input, .output = output};
}

/// By run(), or by start() and wait(), which copies more data when it announces them; on some ranks or on all.
void carry_out(Communicator& group, Request&& task) {
  thread_local int calls = 0;
  const int turn = calls++ % 4;
  const bool starts = turn == 1 || (turn >= 2 && group.rank() % 2 == turn % 2);
  if (starts)
    group.wait(*group.start(std::move(task)), kTestTimeout);
  else
    group.run(std::move(task), kTestTimeout);
}

class Collectives : public ::testing::TestWithParam<int> {
 protected:
  /// body(group, case, root) for every case, a different root each time.
  void for_all(const std::function<void(Communicator&, const Case&, int)>& body) {
    with_group(GetParam(), [&](Communicator& group) {
      int root = 0;
      for (const Case& c : cases(GetParam())) {
        body(group, c, root);
        root = (root + 1) % group.size();
      }
    });
  }
};

TEST_P(Collectives, Broadcast) {
  for_all([](Communicator& group, const Case& c, int root) {
    Buffer buffer(group, c.bytes, c.resident);
    if (group.rank() == root) buffer.fill(0, block(root, 0, c.bytes));
    carry_out(group, request(OperationKind::kBroadcast, c.bytes, root, buffer.data(), buffer.data()));
    ASSERT_TRUE(buffer.holds(0, block(root, 0, c.bytes))) << c.bytes << " bytes, rank " << group.rank();
  });
}

TEST_P(Collectives, AllGather) {
  for_all([](Communicator& group, const Case& c, int) {
    const int n = group.size(), me = group.rank();
    Buffer input(group, c.bytes, c.resident), output(group, c.bytes * static_cast<size_t>(n), c.resident);
    input.fill(0, block(me, 0, c.bytes));
    Request task = request(OperationKind::kAllGather, c.bytes, 0, input.data(), output.data());
    if (c.lists) task.make_pieces().outputs = pointers<void*>(output.data(), c.bytes, n), task.output = nullptr;
    carry_out(group, Request(task));
    for (int r = 0; r < n; ++r)
      ASSERT_TRUE(output.holds(static_cast<size_t>(r) * c.bytes, block(r, 0, c.bytes))) << c.bytes << " from " << r;
  });
}

// Outputs that are written past the caches, at offsets and with lengths that do not fill cache lines.
TEST(LargeCollectives, BroadcastAndAllGatherOfOutputsLargerThanTheCaches) {
  with_group(2, [](Communicator& group) {
    const size_t bytes = (size_t{25} << 20) + 77;
    const int me = group.rank();
    Buffer buffer(group, bytes + 3, false);
    if (me == 1) buffer.fill(3, block(1, 0, bytes));
    carry_out(group, request(OperationKind::kBroadcast, bytes, 1, buffer.data() + 3, buffer.data() + 3));
    ASSERT_TRUE(buffer.holds(3, block(1, 0, bytes)));
    ASSERT_TRUE(buffer.holds(0, Bytes(3, std::byte{0xee})));

    const size_t half = bytes / 2;
    Buffer all(group, 2 * half + 1, false);
    const Bytes mine = block(me, 0, half);
    carry_out(group, request(OperationKind::kAllGather, half, 0, mine.data(), all.data()));
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(all.holds(static_cast<size_t>(r) * half, block(r, 0, half))) << r;
    ASSERT_TRUE(all.holds(2 * half, Bytes(1, std::byte{0xee})));
  });
}

TEST(WaitPolicy, SpinsAsLongForEachRoundAndSleepsWhenNothingComes) {
  WaitPolicy policy(/*spin=*/true, kTestTimeout);
  for (int round = 0; round < 3; ++round) {
    for (unsigned i = 0; i < WaitPolicy::kSpins; ++i) ASSERT_EQ(policy.next(false), WaitPolicy::Step::kSpin);
    ASSERT_EQ(policy.next(false), WaitPolicy::Step::kSleep);
    policy.reset();
  }
  WaitPolicy crowded(/*spin=*/false, kTestTimeout);
  ASSERT_EQ(crowded.next(true), WaitPolicy::Step::kYield);  // at once to a peer that shares the processor
  for (unsigned i = 0; i < WaitPolicy::kSpinsInCrowd; ++i) ASSERT_EQ(crowded.next(false), WaitPolicy::Step::kSpin);
  ASSERT_EQ(crowded.next(false), WaitPolicy::Step::kYield);
}

TEST_P(Collectives, AllGatherInPlace) {
  for_all([](Communicator& group, const Case& c, int) {
    const int n = group.size();
    Buffer output(group, c.bytes * static_cast<size_t>(n), c.resident);
    const size_t mine = static_cast<size_t>(group.rank()) * c.bytes;
    output.fill(mine, block(group.rank(), 0, c.bytes));
    carry_out(group, request(OperationKind::kAllGather, c.bytes, 0, output.data() + mine, output.data()));
    for (int r = 0; r < n; ++r)
      ASSERT_TRUE(output.holds(static_cast<size_t>(r) * c.bytes, block(r, 0, c.bytes))) << c.bytes << " from " << r;
  });
}

TEST_P(Collectives, Gather) {
  for_all([](Communicator& group, const Case& c, int root) {
    const int n = group.size(), me = group.rank();
    Buffer input(group, c.bytes, c.resident), output(group, c.bytes * static_cast<size_t>(n), c.resident);
    input.fill(0, block(me, 0, c.bytes));
    Request task = request(OperationKind::kGather, c.bytes, root, input.data(), me == root ? output.data() : nullptr);
    if (c.lists && me == root) task.make_pieces().outputs = pointers<void*>(output.data(), c.bytes, n);
    carry_out(group, Request(task));
    for (int r = 0; r < n && me == root; ++r)
      ASSERT_TRUE(output.holds(static_cast<size_t>(r) * c.bytes, block(r, 0, c.bytes))) << c.bytes << " from " << r;
    ASSERT_TRUE(me == root || output.untouched());
  });
}

TEST_P(Collectives, Scatter) {
  for_all([](Communicator& group, const Case& c, int root) {
    const int n = group.size(), me = group.rank();
    Buffer input(group, c.bytes * static_cast<size_t>(n), c.resident), output(group, c.bytes, c.resident);
    for (int r = 0; r < n; ++r) input.fill(static_cast<size_t>(r) * c.bytes, block(me, r, c.bytes));
    Request task = request(OperationKind::kScatter, c.bytes, root, me == root ? input.data() : nullptr, output.data());
    if (c.lists && me == root) task.make_pieces().inputs = pointers<const void*>(input.data(), c.bytes, n);
    carry_out(group, Request(task));
    ASSERT_TRUE(output.holds(0, block(root, me, c.bytes))) << c.bytes;
  });
}

TEST_P(Collectives, AllToAll) {
  for_all([](Communicator& group, const Case& c, int) {
    const int n = group.size(), me = group.rank();
    const size_t all = c.bytes * static_cast<size_t>(n);
    Buffer input(group, all, c.resident), output(group, all, c.resident);
    for (int r = 0; r < n; ++r) input.fill(static_cast<size_t>(r) * c.bytes, block(me, r, c.bytes));
    Request task = request(OperationKind::kAllToAll, c.bytes, 0, input.data(), output.data());
    if (c.lists) task.make_pieces().inputs = pointers<const void*>(input.data(), c.bytes, n);
    if (c.lists) task.make_pieces().outputs = pointers<void*>(output.data(), c.bytes, n);
    carry_out(group, Request(task));
    for (int r = 0; r < n; ++r)
      ASSERT_TRUE(output.holds(static_cast<size_t>(r) * c.bytes, block(r, me, c.bytes))) << c.bytes << " from " << r;
  });
}

TEST_P(Collectives, AllToAllWithUnevenSplits) {
  with_group(GetParam(), [](Communicator& group) {
    const auto n = static_cast<size_t>(group.size()), me = static_cast<size_t>(group.rank());
    for (size_t scale : {size_t{0}, size_t{1}, size_t{100}, size_t{20000}}) {
      const auto count = [&](size_t from, size_t to) { return scale * ((from * 3 + to * 5) % 4); };
      Request task{.kind = OperationKind::kAllToAllUneven, .type = DataType::kInt16};
      size_t sent = 0, received = 0;
      for (size_t r = 0; r < n; ++r) {
        task.make_pieces().send_counts.push_back(count(me, r));
        task.make_pieces().receive_counts.push_back(count(r, me));
        sent += 2 * count(me, r), received += 2 * count(r, me);
      }
      Buffer input(group, sent, false), output(group, received, false);
      size_t at = 0;
      for (size_t r = 0; r < n; at += 2 * count(me, r++))
        input.fill(at, block(static_cast<int>(me), static_cast<int>(r), 2 * count(me, r)));
      task.input = input.data(), task.output = output.data();
      carry_out(group, Request(task));
      at = 0;
      for (size_t r = 0; r < n; at += 2 * count(r, me), ++r)
        ASSERT_TRUE(output.holds(at, block(static_cast<int>(r), static_cast<int>(me), 2 * count(r, me)))) << r;
    }
  });
}

/// All ranks' inputs and their reduction, computed once for all of them.
class Reductions {
 public:
  struct Entry {
    std::vector<Bytes> inputs;
    Bytes result;
  };
  const Entry& get(DataType type, ReduceOp op, size_t count, int ranks, const std::vector<double>& factors = {}) {
    std::lock_guard lock(mutex_);
    auto [it, is_new] = cache_.try_emplace({type, count});
    if (is_new) {
      for (int r = 0; r < ranks; ++r)
        it->second.inputs.push_back(random_elements(type, op, count, static_cast<unsigned>(r)));
      it->second.result = reference_reduce(type, op, it->second.inputs, factors);
    }
    return it->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<DataType, size_t>, Entry> cache_;
};

TEST_P(Collectives, ReduceAndReduceScatter) {
  Reductions reductions;
  for_all([&](Communicator& group, const Case& c, int root) {
    const int n = group.size(), me = group.rank();
    const auto blocks = static_cast<size_t>(n);
    for (DataType type : {DataType::kFloat32, DataType::kBFloat16, DataType::kInt8}) {
      const ReduceOp op = type == DataType::kInt8 ? ReduceOp::kMax : ReduceOp::kMean;
      const size_t count = c.bytes / element_bytes(type), bytes = count * element_bytes(type);
      const auto& [inputs, sums] = reductions.get(type, op, count * blocks, n);
      const auto expected = [&, &all = sums](int r) {
        return Bytes(all.begin() + static_cast<long>(static_cast<size_t>(r) * bytes),
                     all.begin() + static_cast<long>(static_cast<size_t>(r + 1) * bytes));
      };
      Buffer input(group, bytes * blocks, c.resident), output(group, bytes, c.resident);
      input.fill(0, inputs[static_cast<size_t>(me)]);
      Request task{.kind = OperationKind::kReduceScatter, .type = type, .op = op, .count = count};
      task.input = input.data(), task.output = output.data();
      if (c.lists) task.make_pieces().inputs = pointers<const void*>(input.data(), bytes, n);
      carry_out(group, Request(task));
      ASSERT_TRUE(output.holds(0, expected(me))) << name(type) << " " << count;

      task = {.kind = OperationKind::kReduce, .type = type, .op = op, .root = root, .count = count};
      task.input = input.data(), task.output = me == root ? input.data() : nullptr;  // in place
      carry_out(group, Request(task));
      ASSERT_TRUE(me == root ? input.holds(0, expected(0)) : input.holds(0, inputs[static_cast<size_t>(me)])) << count;
    }
  });
}

TEST_P(Collectives, EveryReductionOfEveryType) {
  Reductions reductions[kReduceOps];
  const auto factor = [](int rank) { return 0.25 * rank - 1; };
  with_group(GetParam(), [&](Communicator& group) {
    const int n = group.size(), me = group.rank();
    std::vector<double> factors;
    for (int r = 0; r < n; ++r) factors.push_back(factor(r));
    for (int t = 0; t < kDataTypes; ++t)
      for (int o = 0; o < kReduceOps; ++o)
        for (size_t count : {size_t{0}, size_t{3}, size_t{700}, size_t{9'000}}) {
          const auto type = static_cast<DataType>(t);
          const auto op = static_cast<ReduceOp>(o);
          const std::string what = std::string(name(type)) + " " + name(op) + " " + std::to_string(count);
          const int root = (t + o) % n;
          Request task{.kind = OperationKind::kReduce, .type = type, .op = op, .root = root, .count = count};
          task.factor = factor(me);
          if (!is_meaningful(type, op)) {
            for (OperationKind kind : {task.kind, OperationKind::kReduceScatter, OperationKind::kAllReduce}) {
              task.kind = kind;
              ASSERT_THROW(group.run(Request(task), kTestTimeout), Error) << what;
            }
            continue;
          }
          const auto blocks = static_cast<size_t>(n), bytes = count * element_bytes(type);
          const auto& [inputs, result] = reductions[o].get(type, op, count * blocks, n, factors);
          const auto block_of = [&, &all = result](int r) {
            return Bytes(all.begin() + static_cast<long>(static_cast<size_t>(r) * bytes),
                         all.begin() + static_cast<long>(static_cast<size_t>(r + 1) * bytes));
          };
          Buffer input(group, bytes * blocks, o % 2 == 0), output(group, bytes, t % 2 == 0);
          input.fill(0, inputs[static_cast<size_t>(me)]);
          task.input = input.data(), task.output = me == root ? output.data() : nullptr;
          carry_out(group, Request(task));
          ASSERT_TRUE(me == root ? output.holds(0, block_of(0)) : output.untouched()) << what;
          task.kind = OperationKind::kReduceScatter, task.output = output.data();
          carry_out(group, Request(task));
          ASSERT_TRUE(output.holds(0, block_of(me))) << what;
          ASSERT_TRUE(input.holds(0, inputs[static_cast<size_t>(me)])) << what;
          task.kind = OperationKind::kAllReduce;
          carry_out(group, Request(task));
          ASSERT_TRUE(output.holds(0, block_of(0))) << what;
        }
  });
}

TEST_P(Collectives, BarrierHoldsEverybodyBack) {
  std::atomic<int> entered{0};
  with_group(GetParam(), [&](Communicator& group) {
    for (int round = 1; round <= 200; ++round) {
      entered.fetch_add(1);
      group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
      ASSERT_GE(entered.load(), round * group.size());
    }
  });
}

TEST_P(Collectives, DifferentKindsInFlight) {
  with_group(GetParam(), [](Communicator& group) {
    const int n = group.size(), me = group.rank();
    for (size_t bytes : {size_t{8}, size_t{5000}, size_t{100000}}) {
      Buffer broadcast(group, bytes, false), gathered(group, bytes * static_cast<size_t>(n), true);
      Buffer input(group, bytes, true);
      const int root = n - 1;
      if (me == root) broadcast.fill(0, block(root, 3, bytes));
      input.fill(0, block(me, 4, bytes));
      std::vector<WorkPtr> work;
      work.push_back(group.start(request(OperationKind::kBroadcast, bytes, root, broadcast.data(), broadcast.data())));
      work.push_back(group.start(request(OperationKind::kAllGather, bytes, 0, input.data(), gathered.data())));
      work.push_back(group.start({.kind = OperationKind::kBarrier}));
      // Reads what the broadcast writes.
      Buffer second(group, bytes * static_cast<size_t>(n), false);
      work.push_back(group.start(request(OperationKind::kAllGather, bytes, 0, broadcast.data(), second.data())));
      for (auto it = work.rbegin(); it != work.rend(); ++it) group.wait(**it, kTestTimeout);
      ASSERT_TRUE(broadcast.holds(0, block(root, 3, bytes)));
      for (int r = 0; r < n; ++r) {
        ASSERT_TRUE(gathered.holds(static_cast<size_t>(r) * bytes, block(r, 4, bytes)));
        ASSERT_TRUE(second.holds(static_cast<size_t>(r) * bytes, block(root, 3, bytes)));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Values(1, 2, 3, 4, 8));

TEST(Groups, SeveralInDifferentOrdersDoNotBlockEachOther) {
  // Rank 0 waits for group a first, rank 1 for group b first; both need the other's help in both.
  auto a = local_worlds(small_geometry(2)), b = local_worlds(small_geometry(2));
  on_threads(2, [&](int rank) {
    auto set = std::make_shared<ProgressSet>();
    Communicator first(std::move(a[static_cast<size_t>(rank)]), set),
        second(std::move(b[static_cast<size_t>(rank)]), set);
    for (int round = 0; round < 20; ++round) {
      std::vector<float> x(200000, 1), y(200000, 2);
      const auto sum = [](Communicator& group, std::vector<float>& v) {
        return group.start({.kind = OperationKind::kAllReduce,
                            .type = DataType::kFloat32,
                            .count = v.size(),
                            .input = v.data(),
                            .output = v.data()});
      };
      WorkPtr in_first, in_second;
      if (rank == 0) in_first = sum(first, x), in_second = sum(second, y);
      if (rank == 1) in_second = sum(second, y), in_first = sum(first, x);
      const auto poll = [](Communicator& group, const Work& work) {
        for (const Deadline deadline(kTestTimeout); !work.done() && !deadline.passed();) group.progress();
        ASSERT_TRUE(work.done());
      };
      if (round % 2 == 1 && rank == 0) poll(first, *in_first), poll(second, *in_second);
      if (round % 2 == 1 && rank == 1) poll(second, *in_second), poll(first, *in_first);
      if (rank == 0) first.wait(*in_first, kTestTimeout), second.wait(*in_second, kTestTimeout);
      if (rank == 1) second.wait(*in_second, kTestTimeout), first.wait(*in_first, kTestTimeout);
      ASSERT_EQ(x[199999], 2);
      ASSERT_EQ(y[199999], 4);
    }
  });
}

TEST(Groups, SixtyFourRanks) {
  with_group(kMaxRanks, [](Communicator& group) {
    const int n = group.size(), me = group.rank();
    for (size_t count : {size_t{1}, size_t{500}, size_t{20000}}) {
      std::vector<int64_t> x(count, me);
      group.run({.kind = OperationKind::kAllReduce,
                 .type = DataType::kInt64,
                 .count = count,
                 .input = x.data(),
                 .output = x.data()},
                kTestTimeout);
      ASSERT_EQ(x[count - 1], n * (n - 1) / 2);
    }
    for (size_t bytes : {size_t{1}, size_t{100}, size_t{3000}}) {
      Buffer input(group, bytes * static_cast<size_t>(n), false), output(group, bytes * static_cast<size_t>(n), false);
      for (int r = 0; r < n; ++r) input.fill(static_cast<size_t>(r) * bytes, block(me, r, bytes));
      group.run(request(OperationKind::kAllToAll, bytes, 0, input.data(), output.data()), kTestTimeout);
      for (int r = 0; r < n; ++r) ASSERT_TRUE(output.holds(static_cast<size_t>(r) * bytes, block(r, me, bytes)));
    }
  });
}

TEST(Groups, TwoThreadsOfOneRankMayUseOneGroup) {
  with_group(2, [](Communicator& group) {
    // One thread starts collectives, another waits for messages.
    auto messages = std::async(std::launch::async, [&] {
      for (int i = 0; i < 500; ++i) {
        int got = -1;
        auto in = group.receive(&got, sizeof got, 1 - group.rank(), 5);
        auto out = group.send(&i, sizeof i, 1 - group.rank(), 5);
        group.wait(*in, kTestTimeout);
        group.wait(*out, kTestTimeout);
        if (got != i) throw std::runtime_error("got " + std::to_string(got));
      }
    });
    for (int i = 0; i < 500; ++i) {
      int64_t x = i;
      group.run({.kind = OperationKind::kAllReduce, .type = DataType::kInt64, .count = 1, .input = &x, .output = &x},
                kTestTimeout);
      ASSERT_EQ(x, 2 * i);
    }
    messages.get();
  });
}

}  // namespace
}  // namespace lockstep::shm
