#include <lockstep/group.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "base/environment.h"
#include "collectives/engines.h"
#include "collectives/operations.h"
#include "collectives/shm/protocol/communicator.h"
#include "collectives/shm/segment/bootstrap.h"
#include "support/ranks.h"
#include "support/tree_sum.h"

// What every engine must do: every operation, dtype, reduce op and size on 1, 2, 3, 4 and 8 ranks, alone, in flight and
// in several groups at once, compared with its definition computed by one process. A new engine takes one line in
// engines.cpp. LOCKSTEP_NIGHTLY=1 tries every combination instead of every value.

namespace lockstep {
namespace {

using testing::Engine;
using testing::operations;
using testing::Started;
using testing::Trial;

bool nightly() { return Environment::from_process().lockstep_nightly.has_value(); }

class Conformance : public ::testing::TestWithParam<Engine> {
 protected:
  static void on_ranks(const std::function<void(const Group&)>& body) {
    testing::run_ranks(
        GetParam().world_size,
        [&](Context& context) {
          at::set_num_threads(1);
          body(context.group());
        },
        std::chrono::minutes(nightly() ? 25 : 2), {.backend = GetParam().backend, .announce = false},
        GetParam().machines);
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, Conformance, ::testing::ValuesIn(testing::engines()),
                         [](const auto& instance) { return testing::name_of(instance.param); });

/// Around every size, in bytes, at which the shared-memory engine switches its method; Gloo's are among them.
std::vector<int64_t> thresholds(int world_size) {
  const shm::Geometry geometry = shm::geometry_for(world_size);
  std::set<size_t> all{shm::kInlineBytes, geometry.channel_bytes, geometry.chunk_bytes,
                       geometry.chunks * geometry.chunk_bytes};
  for (bool crowded : {false, true}) {
    const shm::Limits limits = shm::Limits::of(world_size, crowded);
    all.insert({limits.one_shot, limits.private_one_shot, limits.staged, limits.one_way, limits.both_ways});
  }
  return {all.begin(), all.end()};
}

std::vector<int64_t> sizes_around_thresholds(int world_size, at::ScalarType dtype) {
  std::vector<int64_t> elements{0, 1};
  for (int64_t bytes : thresholds(world_size))
    for (int delta : {-1, 0, 1}) elements.push_back(bytes / static_cast<int64_t>(c10::elementSize(dtype)) + delta);
  return elements;
}

void try_out(const Group& group, const testing::Operation& operation, const Trial& trial) {
  operation.start(group, trial).wait_and_check();
}

TEST_P(Conformance, EveryOperationDtypeAndReduceOp) {
  on_ranks([](const Group& group) {
    int salt = 0;
    for (at::ScalarType dtype : testing::kDtypes)
      for (int64_t elements :
           nightly() ? sizes_around_thresholds(group.world_size(), dtype) : std::vector<int64_t>{0, 1, 999})
        for (const auto& operation : operations())
          for (ReduceOp op : testing::kReduceOps) {
            if (!operation.reduces && op != ReduceOp::kSum) continue;
            if (!testing::is_meaningful(op, dtype)) continue;
            ++salt;
            for (bool resident : {false, true})
              if (nightly() || resident == (salt % 2 == 0))
                try_out(group, operation, {dtype, op, elements, salt, resident, salt});
            if (::testing::Test::HasFailure()) return;
          }
  });
}

TEST_P(Conformance, SizesAroundEveryThreshold) {
  on_ranks([](const Group& group) {
    int salt = 0;
    const at::ScalarType kDtypes[] = {at::kFloat, at::kChar, at::kBFloat16};
    for (at::ScalarType dtype : kDtypes)
      for (int64_t elements : sizes_around_thresholds(group.world_size(), dtype))
        for (size_t i = 0; i < operations().size(); ++i)
          for (bool resident : {false, true}) {
            // Every operation at each size, with memories and dtypes taking turns; or every combination.
            const size_t turn = i + static_cast<size_t>(elements);
            if (!nightly() && (resident != (turn % 2 == 1) || dtype != kDtypes[turn % 3])) continue;
            ++salt;
            try_out(group, operations()[i], {dtype, ReduceOp::kSum, elements, salt, resident, salt});
            if (::testing::Test::HasFailure()) return;
          }
  });
}

TEST_P(Conformance, TensorsThatAreNotContiguous) {
  on_ranks([](const Group& group) {
    int salt = 0;
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat})
      for (int64_t elements : {0, 1, 999, 70'001})
        for (size_t i = 0; i < operations().size(); ++i)
          for (bool resident : {false, true}) {
            ++salt;
            if (!nightly() && elements == 70'001 && salt % 5 != 0) continue;  // every operation with one of the dtypes
            const Trial trial{dtype, ReduceOp::kSum, elements, salt, resident, salt, /*strided=*/true};
            const Started started = operations()[i].start(group, trial);
            if (started.result.defined() && started.result.numel() > 1) {
              ASSERT_FALSE(started.result.is_contiguous());
            }
            started.wait_and_check();
            if (::testing::Test::HasFailure()) return;
          }
  });
}

TEST_P(Conformance, BlockingForms) {
  on_ranks([](const Group& group) {
    const int n = group.world_size(), me = group.rank();
    int root = 0;
    for (int64_t elements : sizes_around_thresholds(n, at::kFloat)) {
      const auto values = [&](int rank, int64_t count) {
        return testing::values_of(rank, at::kFloat, ReduceOp::kMean, count);
      };
      std::vector<at::Tensor> all, wide;
      for (int rank = 0; rank < n; ++rank)
        all.push_back(values(rank, elements)), wide.push_back(values(rank, elements * n));
      const std::string what = std::to_string(elements) + " elements";
      at::Tensor tensor = all[me].clone();
      group.all_reduce(tensor, ReduceOp::kMean);
      testing::expect_same(tensor, testing::reduced(ReduceOp::kMean, all), "all_reduce of " + what);
      root = (root + 1) % n;
      tensor = all[me].clone();
      group.broadcast(tensor, root);
      testing::expect_same(tensor, all[root], "broadcast of " + what);
      testing::expect_same(group.all_gather(all[me]), at::stack(all), "all_gather of " + what);
      testing::expect_same(group.reduce_scatter(wide[me].view({n, -1}), ReduceOp::kMean),
                           testing::reduced(ReduceOp::kMean, wide).view({n, -1})[me], "reduce_scatter of " + what);
      tensor = all[me].clone();
      group.reduce(tensor, root, ReduceOp::kMean);
      testing::expect_same(tensor, me == root ? testing::reduced(ReduceOp::kMean, all) : all[me], "reduce of " + what);
      const at::Tensor gathered = group.gather(all[me], root);
      ASSERT_EQ(gathered.defined(), me == root);
      if (me == root) testing::expect_same(gathered, at::stack(all), "gather of " + what);
      tensor.zero_();
      group.scatter(tensor, me == root ? at::stack(all) : at::Tensor(), root);
      testing::expect_same(tensor, all[me], "scatter of " + what);
      std::vector<at::Tensor> columns;
      for (int rank = 0; rank < n; ++rank) columns.push_back(wide[rank].view({n, -1})[me]);
      testing::expect_same(group.all_to_all(wide[me].view({n, -1})), at::stack(columns), "all_to_all of " + what);
      const std::vector<int64_t> splits(static_cast<size_t>(n), elements);
      testing::expect_same(group.all_to_all(wide[me], splits, splits), at::cat(columns),
                           "uneven all_to_all of " + what);
      tensor.zero_();
      // Even ranks send first; where there is an odd one out, rank 0 has two neighbours to serve.
      if (me % 2 == 0) group.send(all[me], (me + 1) % n);
      group.recv(tensor, (me + n - 1) % n);
      if (me % 2 == 1) group.send(all[me], (me + 1) % n);
      testing::expect_same(tensor, all[(me + n - 1) % n], "recv of " + what);
      group.barrier();
      if (::testing::Test::HasFailure()) return;
    }
  });
}

/// All kinds of operations in all dtypes, of sizes on both sides of most thresholds.
std::vector<Started> start_many(const Group& group, int count, int salt) {
  std::vector<Started> started;
  for (int i = salt; i < salt + count; ++i) {
    const auto& operation = operations()[i % operations().size()];
    Trial trial{.dtype = testing::kDtypes[i % std::size(testing::kDtypes)],
                .elements = static_cast<int64_t>(i) * i * 131 % 20'000,
                .root = i,
                .resident = i % 2 == 1,
                .salt = i};
    do trial.op = testing::kReduceOps[(static_cast<int>(trial.op) + i) % std::size(testing::kReduceOps)];
    while (!testing::is_meaningful(trial.op, trial.dtype));
    started.push_back(operation.start(group, trial));
  }
  return started;
}

TEST_P(Conformance, ManyInFlightEndInAnyOrder) {
  on_ranks([](const Group& group) {
    for (int round = 0; round < 3 && !::testing::Test::HasFailure(); ++round) {
      std::vector<Started> started = start_many(group, 70, 70 * round + 1);
      // Every rank waits in a different order.
      std::rotate(started.begin(), started.begin() + group.rank() * 7, started.end());
      if (group.rank() % 2 == 1) std::reverse(started.begin(), started.end());
      for (const Started& one : started) one.wait_and_check();
    }
  });
}

TEST_P(Conformance, SeveralGroupsAtOnce) {
  on_ranks([](const Group& all) {
    const int n = all.world_size();
    std::vector<int> reversed, evens, rest;
    for (int rank = n - 1; rank >= 0; --rank) reversed.push_back(rank), (rank % 2 ? rest : evens).push_back(rank);
    if (rest.empty()) rest.push_back(0);
    std::vector<Group> mine{all};
    for (const auto& ranks : {reversed, evens, rest, std::vector<int>{0, n - 1}}) {
      if (n == 1 && ranks.size() == 2) continue;
      if (auto group = all.subgroup(ranks)) mine.push_back(*group);
    }
    for (int round = 0; round < 3 && !::testing::Test::HasFailure(); ++round) {
      std::vector<std::vector<Started>> started;
      for (const Group& group : mine) started.push_back(start_many(group, 25, 25 * round + 1));
      // A cycle of groups that wait for each other, unless each makes progress while its ranks wait in another.
      std::rotate(started.begin(), started.begin() + all.rank() % static_cast<int>(mine.size()), started.end());
      for (const auto& of_group : started)
        for (const Started& one : of_group) one.wait_and_check();
    }
  });
}

TEST_P(Conformance, RanksHoldTheSameBits) {
  on_ranks([](const Group& group) {
    for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
      for (int64_t elements : {1, 1000, 100'003}) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < group.world_size(); ++rank) {
          auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 + rank));
          inputs.push_back(at::randn({elements}, generator, at::TensorOptions(at::kDouble)).to(dtype));
        }
        at::Tensor tensor = inputs[group.rank()].clone();
        group.all_reduce(tensor);
        const at::Tensor all = group.all_gather(tensor);
        for (int rank = 0; rank < group.world_size(); ++rank)
          testing::expect_same(all[rank], tensor, "the bits of rank " + std::to_string(rank));
        for (at::Tensor& input : inputs) input = input.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
        testing::expect_same(tensor, testing::tree_sum(inputs).to(dtype),
                             "the sum in the order of the tree over the ranks");
      }
  });
}

TEST_P(Conformance, WhatMeansNothingIsRefused) {
  on_ranks([](const Group& group) {
    for (at::ScalarType dtype : testing::kDtypes)
      for (ReduceOp op : testing::kReduceOps) {
        if (testing::is_meaningful(op, dtype)) continue;
        if (group.world_size() == 1 && at::isComplexType(dtype))
          continue;  // nothing is compared, so nothing is refused
        const at::Tensor tensor = testing::values_of(group.rank(), dtype, op, 10);
        EXPECT_ANY_THROW(group.all_reduce(tensor, op)) << c10::toString(dtype) << " " << testing::name_of(op);
      }
    // The group still works.
    try_out(group, operations().front(), {.elements = 100});
  });
}

int64_t available_gib() {
  std::ifstream info("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib; info >> name >> kib >> unit;)
    if (name == "MemAvailable:") return kib >> 20;
  return 0;
}

/// Values that differ between positions, also between those 2^31 and 2^32 apart, and that two ranks can add in a byte.
at::Tensor places(int64_t begin, int64_t end, int rank, at::ScalarType dtype) {
  return at::arange(begin, end, at::kLong).remainder_(61).add_(rank + 1).to(dtype);
}

/// Checks both ends and the surroundings of every multiple of 2^30 elements.
void for_windows(int64_t elements, const std::function<void(int64_t begin, int64_t end)>& look) {
  for (int64_t mark = 0; mark <= elements; mark += int64_t{1} << 30)
    look(std::max<int64_t>(0, mark - 5000), std::min(elements, mark + 5000));
  look(elements - 5000, elements);
}

void fill_places(const at::Tensor& tensor, int rank) {
  constexpr int64_t kStep = int64_t{61} << 20;
  const at::Tensor period = places(0, kStep, rank, tensor.scalar_type());
  for (int64_t begin = 0; begin < tensor.numel(); begin += kStep) {
    const int64_t end = std::min(tensor.numel(), begin + kStep);
    tensor.slice(0, begin, end).copy_(period.narrow(0, 0, end - begin));
  }
}

void expect_places(const at::Tensor& tensor, const std::function<at::Tensor(int64_t begin, int64_t end)>& expected,
                   const std::string& what) {
  for_windows(tensor.numel(), [&](int64_t begin, int64_t end) {
    testing::expect_same(tensor.slice(0, begin, end), expected(begin, end), what + " at " + std::to_string(begin));
  });
}

/// Two ranks whose tensors exceed 4 GiB; `body` makes them. Nightly, and only where there is room.
void run_large(const std::function<void(const Group&)>& body) {
  if (!nightly()) GTEST_SKIP() << "SKIPPED BECAUSE tensors over 4 GiB are for make test-nightly";
  if (available_gib() < 15)
    GTEST_SKIP() << "SKIPPED BECAUSE 15 GiB of free memory are needed, there are " << available_gib();
  testing::run_ranks(2, [&](Context& context) { body(context.group()); }, std::chrono::minutes(9),
                     {.backend = "shm", .announce = false});
}

constexpr int64_t kOver4GiB = (int64_t{1} << 32) + 12'345, kOver2GiB = (int64_t{1} << 31) + 12'345;

TEST(Large, AllReduceBroadcastAndAllGatherOfMoreThan4GiB) {
  run_large([](const Group& group) {
    const int me = group.rank();
    for (bool resident : {false, true}) {
      const at::ScalarType dtype = resident ? at::kBFloat16 : at::kByte;  // 2^31 elements of two bytes, 2^32 of one
      const int64_t elements = resident ? kOver4GiB / 2 : kOver4GiB;
      at::Tensor tensor = resident ? group.allocate(elements, at::TensorOptions(dtype)) : at::empty({elements}, dtype);
      fill_places(tensor, me);
      group.all_reduce(tensor);
      const auto sum = [&](int64_t begin, int64_t end) {
        return places(begin, end, 0, dtype) + places(begin, end, 1, dtype);
      };
      expect_places(tensor, sum, "all_reduce");
      EXPECT_EQ(tensor.min().item<double>(), 3);
      EXPECT_EQ(tensor.max().item<double>(), 123);
      fill_places(tensor, me);
      group.broadcast(tensor, 1);
      expect_places(
          tensor, [&](int64_t begin, int64_t end) { return places(begin, end, 1, dtype); }, "broadcast");
      EXPECT_EQ(tensor.max().item<double>(), 62);
    }
    at::Tensor input = at::empty({kOver2GiB}, at::kByte);
    fill_places(input, me);
    const at::Tensor rows = group.all_gather(input);
    for (int rank = 0; rank < 2; ++rank)
      expect_places(
          rows[rank], [&](int64_t begin, int64_t end) { return places(begin, end, rank, at::kByte); }, "all_gather");
  });
}

TEST(Large, ReduceScatterAndGatherOfMoreThan4GiB) {
  run_large([](const Group& group) {
    const int me = group.rank();
    {
      at::Tensor input = at::empty({2 * kOver2GiB}, at::kByte);
      fill_places(input, me);
      const at::Tensor part = group.reduce_scatter(input.view({2, -1}));
      const int64_t at = me * kOver2GiB;
      const auto sum = [&](int64_t begin, int64_t end) {
        return places(at + begin, at + end, 0, at::kByte) + places(at + begin, at + end, 1, at::kByte);
      };
      expect_places(part, sum, "reduce_scatter");
    }
    at::Tensor input = at::empty({kOver2GiB}, at::kByte);
    fill_places(input, me);
    const at::Tensor rows = group.gather(input, 1);
    if (me == 1)
      for (int rank = 0; rank < 2; ++rank)
        expect_places(
            rows[rank], [&](int64_t begin, int64_t end) { return places(begin, end, rank, at::kByte); }, "gather");
  });
}

TEST(Large, AllToAllAndMessagesOfMoreThan4GiB) {
  run_large([](const Group& group) {
    const int me = group.rank();
    const auto zero = [](int64_t begin, int64_t end) { return places(begin, end, 0, at::kByte); };
    {
      // Rank 0 sends everything to rank 1, which sends only a little; otherwise 17 GiB would be needed.
      at::Tensor input = at::empty({me == 0 ? kOver4GiB : 10'000}, at::kByte);
      fill_places(input, me);
      const std::vector<int64_t> sends{me == 0 ? 0 : 10'000, me == 0 ? kOver4GiB : 0};
      const std::vector<int64_t> receives{me == 0 ? 0 : kOver4GiB, me == 0 ? 10'000 : 0};
      const at::Tensor output = group.all_to_all(input, sends, receives);
      if (me == 1) expect_places(output, zero, "all_to_all");
      if (me == 0) testing::expect_same(output, places(0, 10'000, 1, at::kByte), "all_to_all");
    }
    at::Tensor tensor = at::zeros({kOver4GiB}, at::kByte);
    if (me == 0) fill_places(tensor, 0);
    if (me == 0) group.send(tensor, 1);
    if (me == 1) group.recv(tensor, 0), expect_places(tensor, zero, "recv");
  });
}

}  // namespace
}  // namespace lockstep
