#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/error.h"
#include "optim/branching_net.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Checkpoints of an optimizer whose state lies in slices on ranks that share no memory.

namespace lockstep::sliced_checkpoint_test {
namespace {

using testing::Engine;
using testing::run_ranks;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Scope = Checkpointer::Scope;

constexpr int64_t kMiB = 1 << 20;

/// Bytes of /proc/self/status.
int64_t status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  ADD_FAILURE() << "no " << field;
  return 0;
}

/// By how much this process's memory grows while `body` runs, at most.
template <typename Body>
int64_t peak_growth(const Body& body) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const int64_t before = status("VmRSS");
  body();
  return status("VmHWM") - before;
}

int64_t resident_bytes(const at::Tensor& tensor) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) / page * page;
  const size_t bytes = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + tensor.nbytes() - begin;
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), bytes, pages.data()), 0);
  return static_cast<int64_t>(page) *
         std::count_if(pages.begin(), pages.end(), [](auto one) { return (one & 1) != 0; });
}

/// 16 MiB of parameters.
using Model = DistributedDataParallel<torch::nn::Linear>;
torch::nn::Linear large_layer() {
  torch::manual_seed(2);
  return torch::nn::Linear(1024, 4096);
}

void train_large(Model& model, torch::optim::Optimizer& optimizer, int rank) {
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    model(torch::sin(torch::arange(2 * 1024, at::kFloat).reshape({2, 1024}) * (rank + 1) + step))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
}

void expect_state(const c10::IValue& file, const torch::optim::Optimizer& expected) {
  const StateDict state = to_state_dict(file.toGenericDict().at("optimizer").toGenericDict().at("state")),
                  reference = state_dict(expected);
  ASSERT_EQ(state.keys(), reference.keys());
  for (const auto& item : reference) EXPECT_TRUE(item.value().equal(state[item.key()])) << item.key();
}

/// "checkpoint.pt" as it is called there.
std::string only_file(const std::filesystem::path& folder) {
  std::string path;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".pt") path = entry.path().string();
  return path;
}

TEST(SlicedCheckpoint, NoRankHoldsTheWholeStateWhileItIsSaved) {
  for (const int ranks : {2, 3})
    for (const Scope scope : {Scope::kAllRanks, Scope::kRankZero}) {
      const TemporaryFolder folder;
      run_ranks(Engine{ranks, "gloo"}, [&](Context& context) {
        torch::nn::Linear mine = large_layer(), theirs = large_layer();
        Model model(mine, context), reference(theirs, context);
        ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
        ZeroRedundancyOptimizer<AdamW> alone(theirs->parameters(), AdamWOptions(1e-2));
        train_large(model, optimizer, context.rank());
        train_large(reference, alone, context.rank());
        Checkpointer checkpointer(folder.path().string(), context.group(), {.asynchronous = false});
        checkpointer.add("optimizer", optimizer, scope);
        const auto& exp_avg =
            static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(mine->weight.unsafeGetTensorImpl()))
                .exp_avg();
        EXPECT_LT(peak_growth([&] { checkpointer.save(2); }), 8 * kMiB);
        EXPECT_LE(resident_bytes(exp_avg), 16 * kMiB / context.world_size() + 64 * 1024);
        if (context.rank() == 0) expect_state(load_object(only_file(folder.path())), alone);
        // A dictionary of whole tensors is what the file spares every rank.
        const int64_t missing = 32 * kMiB * (context.world_size() - 1) / context.world_size();
        EXPECT_GT(peak_growth([&] { (void)state_dict(optimizer); }), missing - 2 * kMiB);
        train_large(model, optimizer, context.rank());
        EXPECT_LE(resident_bytes(exp_avg), 16 * kMiB / context.world_size() + 64 * 1024);
        context.group().barrier();
      });
    }
}

TEST(SlicedCheckpoint, ASaveInTheBackgroundWritesAndResumesTheSame) {
  for (const int ranks : {2, 3}) {
    const TemporaryFolder folder;
    run_ranks(Engine{ranks, "gloo"}, [&](Context& context) {
      torch::nn::Linear mine = large_layer(), theirs = large_layer(), resumed = large_layer();
      Model model(mine, context), reference(theirs, context), again(resumed, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      ZeroRedundancyOptimizer<AdamW> alone(theirs->parameters(), AdamWOptions(1e-2));
      train_large(reference, alone, context.rank());
      Checkpointer checkpointer(folder.path().string(), context.group());
      checkpointer.add("model", *mine).add("optimizer", optimizer);
      for (int save = 0; save < 2; ++save) {  // the second goes into the memory of the first
        if (save == 0) train_large(model, optimizer, context.rank());
        checkpointer.save(save);
      }
      checkpointer.finish();
      train_large(model, optimizer, context.rank());
      ZeroRedundancyOptimizer resuming(again, AdamWOptions(1e-2));
      Checkpointer from(folder.path().string(), context.group());
      from.add("model", *resumed).add("optimizer", resuming);
      EXPECT_TRUE(from.resume());
      if (context.rank() == 0) expect_state(load_object(only_file(folder.path())), alone);
      train_large(again, resuming, context.rank());
      EXPECT_TRUE(resumed->weight.equal(mine->weight));
      context.group().barrier();
    });
  }
}

TEST(SlicedCheckpoint, NoRankWaitsForOneThatCannotWrite) {
  for (const int ranks : {2, 3}) {
    const TemporaryFolder folder;
    const auto path = folder.path() / "checkpoints";
    run_ranks(Engine{ranks, "gloo"}, [&](Context& context) {
      const testing::Net net = testing::make_net(at::kFloat);
      testing::ShardedModel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      testing::loss_of(model, context.rank(), 0).backward();
      optimizer.step();
      Checkpointer checkpointer(path.string(), context.group(), {.asynchronous = false});
      checkpointer.add("model", *net).add("optimizer", optimizer);
      context.group().barrier();
      if (context.rank() == 0) {
        std::filesystem::remove_all(path);
        std::ofstream(path) << "a file in the folder's place";
      }
      checkpointer.save(1);
      EXPECT_THROW(checkpointer.finish(), StorageError);
      // Ranks that differ, in what is not in slices, save nothing.
      if (context.rank() == 1) net->last->bias.data().fill_(7);
      EXPECT_THROW(checkpointer.save(2), Error);
      context.group().barrier();
    });
  }
}

}  // namespace
}  // namespace lockstep::sliced_checkpoint_test
