#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/error.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/reference.h"

namespace lockstep::shm {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 8};

Request all_reduce(DataType type, ReduceOp op, const void* input, void* output, size_t count) {
  return {.kind = OperationKind::kAllReduce, .type = type, .op = op, .count = count, .input = input, .output = output};
}

double factor(int rank) { return 0.25 * rank - 0.5; }

/// Expected results, computed once for all ranks.
class Expectations {
 public:
  const Bytes& get(DataType type, ReduceOp op, size_t count, int ranks, unsigned seed) {
    std::lock_guard lock(mutex_);
    auto [it, is_new] = cache_.try_emplace({type, op, count, seed});
    if (is_new) {
      std::vector<Bytes> inputs;
      std::vector<double> factors;
      for (int r = 0; r < ranks; ++r) {
        inputs.push_back(random_elements(type, op, count, seed + static_cast<unsigned>(r)));
        factors.push_back(factor(r));
      }
      it->second = reference_reduce(type, op, inputs, factors);
    }
    return it->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<DataType, ReduceOp, size_t, unsigned>, Bytes> cache_;
};

enum class Memory { kPrivate, kResident, kMixed };

/// One all_reduce of `bytes`, in place or not, checked bit for bit.
void check_all_reduce(Communicator& group, Expectations& expectations, DataType type, ReduceOp op, size_t count,
                      Memory memory, bool in_place, unsigned seed) {
  const Bytes data = random_elements(type, op, count, seed + static_cast<unsigned>(group.rank()));
  const bool resident = memory == Memory::kResident || (memory == Memory::kMixed && group.rank() % 2 == 0);
  Bytes private_memory(resident ? 0 : data.size() + 64), separate(in_place ? 0 : data.size() + 64);
  std::byte* buffer = resident ? group.allocate(data.size() + 64) : private_memory.data();
  // Ranks' buffers lie at different offsets.
  std::byte* input = buffer + element_bytes(type) * (static_cast<size_t>(group.rank()) % 4);
  std::byte* output = in_place ? input : separate.data();
  std::copy(data.begin(), data.end(), input);
  Request request = all_reduce(type, op, input, output, count);
  request.factor = factor(group.rank());
  group.run(std::move(request), kTestTimeout);
  const Bytes& expected = expectations.get(type, op, count, group.size(), seed);
  ASSERT_TRUE(same_elements(type, output, expected.data(), count))
      << name(type) << " " << name(op) << " count " << count << " rank " << group.rank() << " of " << group.size()
      << " memory " << static_cast<int>(memory) << " in place " << in_place;
  ASSERT_TRUE(in_place || std::equal(data.begin(), data.end(), input)) << "the input was changed";
  group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
  if (resident) group.free(buffer);
}

class AllReduce : public ::testing::TestWithParam<int> {};

TEST_P(AllReduce, EveryTypeAndOperation) {
  Expectations expectations;
  with_group(GetParam(), [&](Communicator& group) {
    for (int type = 0; type < kDataTypes; ++type)
      for (int op = 0; op < kReduceOps; ++op) {
        const auto data_type = static_cast<DataType>(type);
        const auto reduce_op = static_cast<ReduceOp>(op);
        if (!is_meaningful(data_type, reduce_op)) {
          EXPECT_THROW(group.start(all_reduce(data_type, reduce_op, nullptr, nullptr, 1)), Error);
          continue;
        }
        for (size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{1000}})
          check_all_reduce(group, expectations, data_type, reduce_op, count, Memory::kPrivate, true, 17);
        const size_t large = (size_t{150} << 10) / element_bytes(data_type) + 7;
        check_all_reduce(group, expectations, data_type, reduce_op, large, Memory::kPrivate, false, 18);
        check_all_reduce(group, expectations, data_type, reduce_op, large, Memory::kResident, true, 19);
      }
  });
}

TEST_P(AllReduce, SizesAroundEveryThreshold) {
  Expectations expectations;
  const Limits limits = Limits::of(GetParam());
  const Geometry geometry = small_geometry(GetParam());
  std::vector<size_t> sizes{0, 4, 8, 44, 48, 52, 60, 64, 68, kInlineBytes - 4, kInlineBytes, kInlineBytes + 4, 4096};
  for (size_t limit : {limits.one_shot, Limits::of(GetParam(), true).one_shot, limits.private_one_shot, limits.staged,
                       geometry.chunk_bytes, 2 * geometry.chunk_bytes, geometry.chunks * geometry.chunk_bytes,
                       5 * geometry.chunks * geometry.chunk_bytes})
    for (int delta : {-4, 0, 4}) sizes.push_back(limit + static_cast<size_t>(delta));
  with_group(GetParam(), [&](Communicator& group) {
    for (size_t bytes : sizes)
      for (Memory memory : {Memory::kPrivate, Memory::kResident, Memory::kMixed})
        for (bool in_place : {true, false})
          for (DataType type : {DataType::kFloat32, DataType::kBFloat16})
            check_all_reduce(group, expectations, type, ReduceOp::kSum, bytes / element_bytes(type), memory, in_place,
                             static_cast<unsigned>(bytes));
  });
}

TEST_P(AllReduce, ManyInARowReuseEveryLineAndSlot) {
  with_group(GetParam(), [&](Communicator& group) {
    std::vector<int64_t> buffer(3000);
    for (int64_t i = 0; i < 3000; ++i) {
      const auto count = static_cast<size_t>(i * 37 % 3000);
      for (size_t k = 0; k < count; ++k) buffer[k] = i * group.rank() + static_cast<int64_t>(k);
      group.run(all_reduce(DataType::kInt64, ReduceOp::kSum, buffer.data(), buffer.data(), count), kTestTimeout);
      const int64_t n = group.size();
      for (size_t k = 0; k < count; k += 97) ASSERT_EQ(buffer[k], i * n * (n - 1) / 2 + n * static_cast<int64_t>(k));
    }
  });
}

TEST_P(AllReduce, SeveralInFlightEndInOrder) {
  with_group(GetParam(), [&](Communicator& group) {
    const int64_t n = group.size();
    for (int round = 0; round < 20; ++round) {
      // More operations than lines, of all sizes, half of them resident.
      std::vector<std::byte*> memory;
      std::vector<Bytes> own(50);
      std::vector<WorkPtr> work;
      for (size_t i = 0; i < own.size(); ++i) {
        const size_t count = (i * i * 131) % 40000 + 1;
        own[i].resize(i % 2 ? count * 8 : 0);
        memory.push_back(i % 2 ? own[i].data() : group.allocate(count * 8));
        auto* values = reinterpret_cast<int64_t*>(memory[i]);
        for (size_t k = 0; k < count; ++k) values[k] = group.rank() + static_cast<int64_t>(i + k);
        work.push_back(group.start(all_reduce(DataType::kInt64, ReduceOp::kSum, values, values, count)));
      }
      group.wait(*work.back(), kTestTimeout);
      for (size_t i = 0; i < own.size(); ++i) {
        ASSERT_TRUE(work[i]->done());
        const size_t count = (i * i * 131) % 40000 + 1;
        const auto* values = reinterpret_cast<const int64_t*>(memory[i]);
        for (size_t k = 0; k < count; k += 61)
          ASSERT_EQ(values[k], n * (n - 1) / 2 + n * static_cast<int64_t>(i + k)) << i << " " << k;
        if (i % 2 == 0) group.free(memory[i]);
      }
    }
  });
}

TEST_P(AllReduce, OneBufferUsedTwiceInFlightIsReducedTwice) {
  with_group(GetParam(), [&](Communicator& group) {
    for (size_t count : {size_t{1}, size_t{1000}, size_t{100000}}) {
      std::vector<int64_t> values(count, 1);
      auto first = group.start(all_reduce(DataType::kInt64, ReduceOp::kSum, values.data(), values.data(), count));
      auto second = group.start(all_reduce(DataType::kInt64, ReduceOp::kSum, values.data(), values.data(), count));
      group.wait(*second, kTestTimeout);
      const int64_t expected = int64_t{group.size()} * group.size();
      for (int64_t value : values) ASSERT_EQ(value, expected);
      group.wait(*first, kTestTimeout);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllReduce, ::testing::ValuesIn(kRanks));

/// What the group cuts up, run by two threads in turns.
void check_sharing_out(int count) {
  Expectations expectations;
  with_group(count, [&](Communicator& group) {
    size_t parts_run = 0;
    group.share_out_by([&](size_t parts, const std::function<void(size_t)>& run) {
      std::thread helper([&] {
        for (size_t part = 1; part < parts; part += 2) run(part);
      });
      for (size_t part = 0; part < parts; part += 2) run(part);
      helper.join();
      parts_run += parts;
    });
    const auto ranks = static_cast<size_t>(group.size());
    const auto parts_of = [&](DataType type, size_t bytes, Memory memory) {
      parts_run = 0;
      check_all_reduce(group, expectations, type, ReduceOp::kMean, bytes / element_bytes(type), memory, true, 23);
      return parts_run;
    };
    const size_t large = ranks * (kSharedOutBytes + kPartBytes / 2), small = ranks * kSharedOutBytes / 2;
    for (const DataType type : {DataType::kFloat32, DataType::kBFloat16}) {
      EXPECT_EQ(parts_of(type, large, Memory::kResident), 3);
      EXPECT_GT(parts_of(type, large + 24, Memory::kResident), 0);
      EXPECT_EQ(parts_of(type, small, Memory::kResident), 0);
      EXPECT_EQ(parts_of(type, large, Memory::kPrivate), 0);
    }
  });
}

TEST(AllReduceThreads, LargeSumsAreSharedOutBetweenThreads) {
  for (const int ranks : {2, 3}) check_sharing_out(ranks);
}

}  // namespace
}  // namespace lockstep::shm
