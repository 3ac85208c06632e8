// Checkpoints in memory of fully sharded training: ranks that end are started again, on as many machines or others, and
// also when a machine has lost its memory.

#include <lockstep/checkpointer.h>

#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/state_memory.h"
#include "checkpoint/failure.h"
#include "checkpoint/memory/kept_state.h"
#include "fully_sharded/deep.h"
#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::sharded_memory_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;

constexpr int kLayers = 4, kEnd = 7;

/// A launcher's memory for each machine, which are letters.
class Memories {
 public:
  explicit Memories(const std::string& machines) {
    for (const char machine : machines) lose(machine);
  }
  /// That machine is another one from now on.
  void lose(char machine) { fds_[machine] = StateMemory::make(); }
  int of(char machine) const { return fds_.at(machine).get(); }
  uint64_t kib_of(char machine) const {
    struct stat status {};
    return ::fstat(of(machine), &status) == 0 ? static_cast<uint64_t>(status.st_blocks) / 2 : 0;
  }
  /// In a rank: as its launcher does it.
  void enter(const Context& context, const std::string& machines) const {
    const auto rank = static_cast<size_t>(context.rank());
    const char machine = machines[rank];
    ::setenv("LOCKSTEP_MEMORY_FD", std::to_string(of(machine)).c_str(), 1);
    ::setenv("LOCAL_RANK", std::to_string(rank - machines.find(machine)).c_str(), 1);
  }

 private:
  std::map<char, FileDescriptor> fds_;
};

/// How ranks are placed: "aab" has two machines.
Engine engine_of(const std::string& machines) {
  const int ranks = static_cast<int>(machines.size());
  if (machines.find_first_not_of(machines[0]) == std::string::npos) return {ranks, ranks == 1 ? "" : "shm"};
  return {ranks, "hierarchical", machines};
}

struct Run {
  int end = kEnd;
  int every = 1;
  int expected_start = 0;
  bool keep_gathered = false;
  at::ScalarType dtype = at::kFloat;
};

template <typename Model>
Model made(const SmallGpt& net, Context& context, const Run& run) {
  if constexpr (std::derived_from<Model, FullySharded>)
    return Model(net, context, {.keep_gathered = run.keep_gathered});
  else
    return Model(net, context);
}

template <typename Model>
std::string trained(Context& context, const std::string& folder, const Run& run) {
  SmallGpt net(kLayers);
  net->to(run.dtype);
  Model model = made<Model>(net, context, run);
  const AdamWOptions options = AdamWOptions(0.01).weight_decay(0.1);
  ZeroRedundancyOptimizer optimizer(model, decay_groups(*net, options), options,
                                    {.master_weights = run.dtype != at::kFloat});
  Checkpointer checkpointer(folder, context.group(), {.memory_every_n_steps = run.every});
  checkpointer.add("model", model).add("optimizer", optimizer);
  checkpointer.resume();
  EXPECT_EQ(checkpointer.resumed_step(), run.expected_start);
  for (auto step = static_cast<int>(checkpointer.resumed_step()); step < run.end; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = text_of(step, context.rank());
    loss_of(model(data, step).to(at::kFloat), data).backward();
    optimizer.step();
    checkpointer.step(step + 1);
  }
  checkpointer.finish();
  if constexpr (std::derived_from<Model, FullySharded>) {
    return model.hash();
  } else {
    return hash(state_dict(*net));
  }
}

using Replicated = DistributedDataParallel<SmallGpt>;
using Sharded = FullyShardedDataParallel<SmallGpt>;

/// Rank 0's result.
template <typename Model = Sharded>
std::string run(const Memories& memories, const std::string& machines, const std::string& folder, const Run& how) {
  const TemporaryFolder results;
  const std::string path = results.path() / "hash";
  run_alike(engine_of(machines), [&](Context& context) {
    memories.enter(context, machines);
    const std::string hash = trained<Model>(context, folder, how);
    if (context.rank() == 0) std::ofstream(path) << hash;
  });
  std::string hash;
  std::getline(std::ifstream(path), hash);
  EXPECT_FALSE(hash.empty());
  return hash;
}

std::string undisturbed(const std::string& machines) {
  const TemporaryFolder folder;
  return run(Memories(machines), machines, folder.path(), {});
}

TEST(ShardedMemory, ARestartEndsWithTheBitsOfAnUndisturbedTraining) {
  for (const std::string machines : {"a", "aa", "aaa", "ab", "aabb", "abc", "abcd"}) {
    SCOPED_TRACE(machines);
    const Memories memories(machines);
    const TemporaryFolder folder;
    run(memories, machines, folder.path(), {.end = 3});
    run(memories, machines, folder.path(), {.end = 4, .expected_start = 3});
    EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 4}), undisturbed(machines));
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "nothing is saved to disk";
  }
}

TEST(ShardedMemory, MastersComeBackToo) {
  for (const std::string machines : {"aa", "ab", "aabb"}) {
    SCOPED_TRACE(machines);
    Memories memories(machines), others(machines);
    const TemporaryFolder folder, whole;
    run(memories, machines, folder.path(), {.end = 3, .dtype = at::kBFloat16});
    if (machines != "aa") memories.lose('b');
    EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 3, .dtype = at::kBFloat16}),
              run(others, machines, whole.path(), {.dtype = at::kBFloat16}));
  }
}

TEST(ShardedMemory, ALostMachineComesBackFromItsNeighbour) {
  for (const std::string machines : {"ab", "aabb", "abcd"})
    for (const char lost : {'a', 'b'}) {
      SCOPED_TRACE(machines + " without " + lost);
      Memories memories(machines);
      const TemporaryFolder folder;
      run(memories, machines, folder.path(), {.end = 3});
      memories.lose(lost);
      run(memories, machines, folder.path(), {.end = 4, .expected_start = 3});
      memories.lose(lost);
      EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 4}), undisturbed(machines));
    }
}

TEST(ShardedMemory, UnitsThatStayGatheredAreSavedInSlicesToo) {
  for (const std::string machines : {"ab", "aabb"}) {
    SCOPED_TRACE(machines);
    Memories memories(machines);
    const TemporaryFolder folder;
    run(memories, machines, folder.path(), {.end = 3, .keep_gathered = true});
    memories.lose('b');
    run(memories, machines, folder.path(), {.end = 4, .expected_start = 3, .keep_gathered = true});
    // Units need not stay gathered in all runs.
    EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 4}), undisturbed(machines));
  }
}

TEST(ShardedMemory, TwoMachinesMayBeLostThatAreNoNeighbours) {
  const std::string machines = "abcd";
  Memories memories(machines);
  const TemporaryFolder folder;
  run(memories, machines, folder.path(), {.end = 3});
  memories.lose('b');
  memories.lose('d');
  EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 3}), undisturbed(machines));
  memories.lose('b');
  memories.lose('c');
  run(memories, machines, folder.path(), {.end = 1});  // neighbours: nothing is left, and nothing is on disk
}

/// The state of step 3 on disk, which another test compares with replicas.
void save_to_disk(const std::string& machines, const std::string& folder) {
  run_alike(engine_of(machines), [&](Context& context) {
    SmallGpt net(kLayers);
    Sharded model(net, context);
    const AdamWOptions options = AdamWOptions(0.01).weight_decay(0.1);
    ZeroRedundancyOptimizer optimizer(model, decay_groups(*net, options), options);
    Checkpointer checkpointer(folder, context.group());
    checkpointer.add("model", model).add("optimizer", optimizer);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor data = text_of(step, context.rank());
      loss_of(model(data, step), data).backward();
      optimizer.step();
    }
    checkpointer.save(3);
    checkpointer.finish();
  });
}

TEST(ShardedMemory, OtherNumbersOfRanksAndMachinesGoOn) {
  const TemporaryFolder disk;
  save_to_disk("aaaa", disk.path());  // the bits are the same on all machines
  const std::map<std::string, std::vector<std::string>> resumed_by = {
      {"aaaa", {"aa", "abcd"}}, {"aabb", {"a", "ab", "aabb"}}, {"abcd", {"abc", "abcd"}}};
  for (const auto& [saves, all] : resumed_by)
    for (const std::string& resumes : all) {
      SCOPED_TRACE(saves + " to " + resumes);
      const Memories memories("abcd");  // the letters that are left have theirs
      const TemporaryFolder folder;
      run(memories, saves, folder.path(), {.end = 3});
      EXPECT_EQ(run(memories, resumes, folder.path(), {.expected_start = 3}),
                run(Memories("abcd"), resumes, disk.path(), {.expected_start = 3}));
    }
}

TEST(ShardedMemory, ReplicasGoOnFromItAndItFromReplicas) {
  const TemporaryFolder of_replicas;
  const Memories replicas("ab");
  run<Replicated>(replicas, "aa", of_replicas.path(), {.end = 3});
  EXPECT_EQ(run(replicas, "aa", of_replicas.path(), {.expected_start = 3}), undisturbed("aa"));
  const Memories memories("a");
  const TemporaryFolder folder;
  run(memories, "aa", folder.path(), {.end = 3});
  EXPECT_EQ(run<Replicated>(memories, "aa", folder.path(), {.expected_start = 3}), undisturbed("aa"));
}

TEST(ShardedMemory, WhatALauncherThatGivesUpLeavesOnDiskIsAsGood) {
  for (const std::string machines : {"a", "aaa", "ab", "aabb"}) {
    SCOPED_TRACE(machines);
    Memories memories("abcd");
    const TemporaryFolder folder;
    run(memories, machines, folder.path(), {.end = 3});
    for (const char machine : std::string("ab")) {
      if (machines.find(machine) == std::string::npos) continue;
      const KeptState kept = keep_state(memories.of(machine), "", /*is_sound=*/true);
      EXPECT_EQ(kept.problem, "");
      EXPECT_EQ(kept.step, 3);
      EXPECT_EQ(kept.path_step, 3);
      memories.lose(machine);
    }
    EXPECT_EQ(run(memories, machines, folder.path(), {.expected_start = 3}), undisturbed(machines));
  }
}

TEST(ShardedMemory, AMachineThatHoldsAPartSaysSo) {
  const Memories memories("abc");
  const TemporaryFolder folder;
  run(memories, "abc", folder.path(), {.end = 3});
  const KeptState kept = keep_state(memories.of('b'), "", /*is_sound=*/true);
  EXPECT_EQ(kept.step, 3);
  EXPECT_EQ(kept.path, "");
  EXPECT_EQ(kept.problem,
            "this machine holds the slices of ranks 0, 1 alone, of 3, and one machine writes a checkpoint. The next "
            "run resumes the newest checkpoint on disk, so save there as well (every_minutes)");
}

TEST(ShardedMemory, NoMachineHoldsTheWhole) {
  const std::string machines = "abcd";
  const Memories memories(machines);
  const TemporaryFolder folder;
  run_alike(engine_of(machines), [&](Context& context) {
    memories.enter(context, machines);
    Deep net;
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-3));
    Checkpointer checkpointer(folder.path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("model", model).add("optimizer", optimizer);
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      model(at::ones({1, 1024})).sum().backward();
      optimizer.step();
      checkpointer.step(step);
    }
  });
  // Three arrays of each parameter, in two slots; a quarter of them is a rank's, and a quarter its neighbour's.
  const uint64_t half = 2 * 3 * kModelKib / 2;
  for (const char machine : machines) {
    EXPECT_GT(memories.kib_of(machine), half);
    EXPECT_LT(memories.kib_of(machine), half + half / 8);
  }
  // Fewer machines: each has more of them, and frees what it held for others.
  const TemporaryFolder other;
  run_alike(engine_of("ab"), [&](Context& context) {
    memories.enter(context, "ab");
    Deep net;
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-3));
    Checkpointer checkpointer(folder.path(), context.group(), {.memory_every_n_steps = 1});
    checkpointer.add("model", model).add("optimizer", optimizer);
    EXPECT_FALSE(checkpointer.resume()) << "c and d are gone, which are neighbours";
  });
}

}  // namespace
}  // namespace lockstep::sharded_memory_test
