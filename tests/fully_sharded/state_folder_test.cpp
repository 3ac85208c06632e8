// The optimizer's state in files on a disk: the same bits, no names, and errors on all ranks.

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include <gtest/gtest.h>
#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/error.h"
#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::state_folder_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int kLayers = 3, kSteps = 5, kSaved = 2;

/// A folder on the disk of the build: the one for temporary files may lie in memory.
struct DiskFolder {
  DiskFolder() : path((std::filesystem::current_path() / "state_folder_XXXXXX").string()) {
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no folder " + path);
  }
  ~DiskFolder() { std::filesystem::remove_all(path); }
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;
  bool is_empty() const { return std::filesystem::is_empty(path); }
  std::string path;
};

std::string memory_map() {
  std::ifstream file("/proc/self/maps");
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Training {
  std::string state_folder = {}, checkpoints = {};
  int end = kSteps;
};

/// Trains from the newest checkpoint, if there is one, saves step kSaved, and returns the hash of the weights.
template <typename Options>
std::string trained(const Context& context, const Options& options, const Training& what) {
  SmallGpt net(kLayers);
  FullyShardedDataParallel model(net, context);
  ZeroRedundancyOptimizer optimizer(model, options, {.state_folder = what.state_folder});
  std::optional<Checkpointer> checkpointer;
  if (!what.checkpoints.empty()) {
    checkpointer.emplace(what.checkpoints, context.group());
    checkpointer->add("model", model).add("optimizer", optimizer);
    checkpointer->resume();
  }
  for (auto step = checkpointer ? static_cast<int>(checkpointer->resumed_step()) : 0; step < what.end; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = text_of(step, context.rank());
    loss_of(model(data, step), data).backward();
    optimizer.step();
    if (checkpointer && step + 1 == kSaved) checkpointer->save(kSaved);
    if (!what.state_folder.empty()) {
      EXPECT_NE(memory_map().find(what.state_folder + "/"), std::string::npos) << "step " << step;
    }
  }
  return model.hash();
}

class StateFolderOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {3, "shm"}, {2, "gloo"}, {2, "hierarchical", "ab"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Machines, StateFolderOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(StateFolderOn, HasTheBitsOfMemory) {
  const DiskFolder folder;
  run_alike(GetParam(), [&](Context& context) {
    const auto compare = [&](const auto& options) {
      const std::string in_memory = trained(context, options, {});
      EXPECT_EQ(trained(context, options, {.state_folder = folder.path}), in_memory);
    };
    compare(AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
    compare(SGDOptions(0.1).momentum(0.9).dampening(0.3));
  });
  EXPECT_TRUE(folder.is_empty()) << "files without names";
}

TEST_P(StateFolderOn, IsWhereAResumedStateGoes) {
  const DiskFolder folder;
  const TemporaryFolder checkpoints;
  run_alike(GetParam(), [&](Context& context) {
    const AdamWOptions options(0.01);
    const std::string undisturbed = trained(context, options, {});
    trained(context, options, {.state_folder = folder.path, .checkpoints = checkpoints.path(), .end = kSaved});
    EXPECT_EQ(trained(context, options, {.state_folder = folder.path, .checkpoints = checkpoints.path()}), undisturbed);
    EXPECT_EQ(trained(context, options, {.checkpoints = checkpoints.path()}), undisturbed) << "resumed in memory";
  });
}

/// The text of the error, which all ranks get.
std::string failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST_P(StateFolderOn, ThatCannotBeUsedIsAnErrorOnAllRanks) {
  const DiskFolder folder;
  run_alike(GetParam(), [&](Context& context) {
    const bool is_last = context.rank() == context.world_size() - 1;
    const AdamWOptions options(0.01);
    const std::string missing =
        failure([&] { trained(context, options, {.state_folder = folder.path + (is_last ? "/missing" : "")}); });
    EXPECT_NE(missing.find("cannot keep an optimizer's state in the folder " + folder.path + "/missing: No such file"),
              std::string::npos)
        << missing;
    const std::string memory =
        failure([&] { trained(context, options, {.state_folder = is_last ? "/dev/shm" : folder.path}); });
    EXPECT_NE(memory.find("in the folder /dev/shm: it is in memory (tmpfs); name a folder on a disk"),
              std::string::npos)
        << memory;
    if (context.world_size() == 1) return;
    const std::string differs =
        failure([&] { trained(context, options, {.state_folder = is_last ? "" : folder.path}); });
    EXPECT_NE(differs.find("`state in files of a state_folder` on "), std::string::npos) << differs;
    EXPECT_NE(differs.find("`state in memory` on rank " + std::to_string(context.world_size() - 1)), std::string::npos)
        << differs;
  });
}

TEST_P(StateFolderOn, ThatCannotBeUsedIsToldBeforeTheFirstStep) {
  const DiskFolder folder;
  const std::string file = folder.path + "/file", gone = folder.path + "/gone";
  std::ofstream(file) << "text";
  std::filesystem::create_directory(gone);
  run_alike(GetParam(), [&](Context& context) {
    const AdamWOptions options(0.01);
    SmallGpt net(kLayers);
    FullyShardedDataParallel model(net, context);
    const bool is_last = context.rank() == context.world_size() - 1;
    const std::string odd = "rank " + std::to_string(context.world_size() - 1) + ": ";
    const auto told = [&](const std::string& of_last) -> std::string {
      try {
        ZeroRedundancyOptimizer optimizer(model, options, {.state_folder = is_last ? of_last : folder.path});
      } catch (const StorageError& error) {
        return error.what();
      }
      return "no error";
    };
    for (const auto& [path, why] : {std::pair(folder.path + "/missing", "No such file or directory"),
                                    {file, "Not a directory"},
                                    {std::string("/dev/shm"), "it is in memory (tmpfs); name a folder on a disk"}})
      EXPECT_NE(told(path).find(odd + "cannot keep an optimizer's state in the folder " + path + ": " + why),
                std::string::npos)
          << told(path);

    ZeroRedundancyOptimizer optimizer(model, options, {.state_folder = is_last ? gone : folder.path});
    context.group().barrier();
    if (is_last) std::filesystem::remove(gone);
    const at::Tensor data = text_of(0, context.rank());
    loss_of(model(data, 0), data).backward();
    const std::string removed = failure([&] { optimizer.step(); });
    EXPECT_NE(removed.find("cannot keep an optimizer's state in the folder " + gone + ": No such file"),
              std::string::npos)
        << removed;
  });
}

TEST(StateFolder, IsForPartsOfAFullyShardedModel) {
  for (const int ranks : {1, 2})
    run_alike({ranks, ""}, [](Context& context) {
      SmallGpt net(kLayers);
      DistributedDataParallel model(net, context);
      const std::string text =
          failure([&] { ZeroRedundancyOptimizer optimizer(model, AdamWOptions(0.01), {.state_folder = "."}); });
      EXPECT_NE(text.find("state_folder is for the parts of a FullyShardedDataParallel"), std::string::npos) << text;
    });
}

}  // namespace
}  // namespace lockstep::state_folder_test
