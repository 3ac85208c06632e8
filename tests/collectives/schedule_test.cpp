#include <lockstep/group.h>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string_view>

#include "base/environment.h"
#include "collectives/operations.h"
#include "support/ranks.h"

// Random valid sequences of 1,000 operations on 3 ranks: several groups, blocking and in flight, all dtypes, reduce ops
// and sizes, executed by shared memory and by Gloo. Results are compared bit by bit: all numbers are whole and small
// enough for every sum to be exact. A failure prints its seed; LOCKSTEP_FUZZ_SEED reproduces it.

namespace lockstep {
namespace {

constexpr int kRanks = 3;
constexpr int kOperations = 1000;

/// One entry of the schedule, the same on all ranks except for what `wait` picks.
struct Step {
  int group;
  size_t operation;
  testing::Trial trial;
  size_t wait;  ///< afterwards this many of the operations in flight are waited for
};

const std::vector<std::vector<int>> kGroups = {{0, 1, 2}, {2, 0, 1}, {1, 0}, {2, 1}, {0, 2}, {1}};

std::vector<Step> make_schedule(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  std::vector<Step> schedule;
  while (schedule.size() < kOperations) {
    Step step{.group = static_cast<int>(below(kGroups.size())),
              .operation = static_cast<size_t>(below(testing::operations().size())),
              .trial = {},
              .wait = 0};
    step.trial.dtype = testing::kDtypes[below(std::size(testing::kDtypes))];
    step.trial.op = testing::kReduceOps[below(std::size(testing::kReduceOps))];
    if (!testing::is_meaningful(step.trial.op, step.trial.dtype)) continue;
    // As many of each order of magnitude, up to 100,000.
    step.trial.elements = below(std::vector<uint64_t>{2, 16, 200, 3000, 20'000, 100'000}[below(6)]);
    step.trial.root = static_cast<int>(below(kRanks));
    step.trial.resident = below(2) == 1;
    step.trial.salt = static_cast<int>(schedule.size());  // also the tag: no message is taken for another
    // Half of the steps block; sometimes everything in flight is waited for.
    const int64_t mood = below(20);
    step.wait = mood == 0 ? kOperations : mood < 10 ? 1 : mood < 12 ? 2 : 0;
    schedule.push_back(step);
  }
  return schedule;
}

/// Hashes of every step's result on every rank of both engines; shared by the processes.
class Digests {
 public:
  Digests() {
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    words_ = static_cast<uint64_t*>(memory);
  }
  ~Digests() { ::munmap(words_, kBytes); }
  Digests(const Digests&) = delete;
  uint64_t& at(size_t engine, size_t rank, size_t step) const {
    return words_[(engine * kRanks + rank) * kOperations + step];
  }

 private:
  static constexpr size_t kBytes = size_t{2} * kRanks * kOperations * sizeof(uint64_t);
  uint64_t* words_;
};

uint64_t digest(const at::Tensor& tensor) {
  if (!tensor.defined()) return 1;
  const at::Tensor dense = tensor.contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()}) | 2;
}

/// Executes the schedule; each rank waits for what is in flight in its own order.
void carry_out(const Group& world, const std::vector<Step>& schedule, uint64_t seed,
               const std::function<uint64_t&(size_t step)>& digest_of) {
  std::vector<std::optional<Group>> groups{world};
  for (size_t i = 1; i < kGroups.size(); ++i) groups.push_back(world.subgroup(kGroups[i]));
  std::mt19937_64 random(seed * kRanks + static_cast<uint64_t>(world.rank()));
  std::vector<std::pair<size_t, testing::Started>> in_flight;
  const auto end_one = [&](size_t place) {
    const auto& [step, started] = in_flight[place];
    SCOPED_TRACE("step " + std::to_string(step));
    started.wait_and_check();
    digest_of(step) = digest(started.result);
    in_flight.erase(in_flight.begin() + static_cast<long>(place));
  };
  for (size_t i = 0; i < schedule.size() && !::testing::Test::HasFailure(); ++i) {
    const Step& step = schedule[i];
    if (groups[step.group]) {
      in_flight.emplace_back(i, testing::operations()[step.operation].start(*groups[step.group], step.trial));
      if (step.wait == 1) end_one(in_flight.size() - 1);  // as a blocking call
      if (step.wait == 0) (void)in_flight[random() % in_flight.size()].second.works[0].is_completed();  // a poll
    }
    if (step.wait == 2 && !in_flight.empty()) end_one(random() % in_flight.size());
    while (step.wait == kOperations && !in_flight.empty()) end_one(random() % in_flight.size());
  }
  while (!in_flight.empty() && !::testing::Test::HasFailure()) end_one(in_flight.size() - 1);
}

void compare(uint64_t seed) {
  std::printf("LOCKSTEP_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  SCOPED_TRACE("LOCKSTEP_FUZZ_SEED=" + std::to_string(seed) + " repeats this");
  const auto schedule = make_schedule(seed);
  const Digests digests;
  const std::string engines[] = {"shm", "gloo"};
  for (size_t engine = 0; engine < 2; ++engine)
    testing::run_ranks(kRanks,
                       [&](Context& context) {
                         ASSERT_EQ(context.group().backend(), engines[engine]);
                         const auto rank = static_cast<size_t>(context.rank());
                         carry_out(context.group(), schedule, seed,
                                   [&](size_t step) -> uint64_t& { return digests.at(engine, rank, step); });
                       },
                       std::chrono::minutes(2), {.backend = engines[engine], .announce = false});
  size_t results = 0;
  for (size_t rank = 0; rank < kRanks; ++rank)
    for (size_t step = 0; step < schedule.size(); ++step) {
      const auto& members = kGroups[schedule[step].group];
      const bool is_member = std::count(members.begin(), members.end(), static_cast<int>(rank)) == 1;
      ASSERT_EQ(digests.at(0, rank, step) != 0, is_member) << "step " << step << " is missing on rank " << rank;
      ASSERT_EQ(digests.at(0, rank, step), digests.at(1, rank, step))
          << "step " << step << ", " << testing::operations()[schedule[step].operation].name << " "
          << schedule[step].trial << " in group " << schedule[step].group << ": shm and Gloo differ on rank " << rank;
      results += is_member;
    }
  EXPECT_GT(results, size_t{kOperations});
}

TEST(Schedules, OfAThousandOperationsEndAsWithGloo) {
  const Environment environment = Environment::from_process();
  if (environment.lockstep_fuzz_seed) return compare(std::stoull(*environment.lockstep_fuzz_seed));
  compare(1);
  // Different seeds every night.
  std::random_device entropy;
  for (int i = 0; environment.lockstep_nightly && i < 20 && !HasFailure(); ++i) compare(entropy());
}

}  // namespace
}  // namespace lockstep
