#include "hosts/workplace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "launch/launch_error.h"
#include "support/temporary_folder.h"

namespace lockstep::hosts {
namespace {

Prepare plan_in(const TemporaryFolder& folder) {
  return {.command = {"/bin/sh", "-c", "true"},
          .environment = {"PATH=/bin", "HOSTNAME=coordinator"},
          .folder = folder.path().string(),
          .run_dir = folder.path().string() + "/run",
          .slots = 2,
          .run_id = "id"};
}

TEST(Workplace, SaysWhatTheCoordinatorCompares) {
  const TemporaryFolder folder;
  const Workplace place(plan_in(folder), {}, "", "127.0.0.1");
  const Ready ready = place.ready();
  EXPECT_EQ(ready.address, "127.0.0.1");
  EXPECT_GT(ready.master_port, 0);
  EXPECT_EQ(ready.program_hash, program_hash("/bin/sh", {"/bin/sh", "-c", "true"}));
  EXPECT_EQ(std::filesystem::current_path(), std::filesystem::canonical(folder.path()));
  EXPECT_TRUE(std::filesystem::is_directory(place.folder()));
}

TEST(Workplace, TheAddressIsThatOfTheInterfaceOrOfThePlanOrOfTheChannel) {
  const TemporaryFolder folder;
  Prepare plan = plan_in(folder);
  EXPECT_EQ(Workplace(plan, {}, "", "127.0.0.3").address(), "127.0.0.3");
  plan.address = "127.0.0.2";
  EXPECT_EQ(Workplace(plan, {}, "", "127.0.0.3").address(), "127.0.0.2");
  EXPECT_EQ(Workplace(plan, {}, "lo", "127.0.0.3").address(), "127.0.0.1");
}

TEST(Workplace, AFolderThatIsMissingIsALaunchError) {
  const TemporaryFolder folder;
  Prepare plan = plan_in(folder);
  plan.folder += "/missing";
  try {
    const Workplace place(plan, {}, "", "127.0.0.1");
    FAIL() << "it was entered";
  } catch (const LaunchError& error) {
    EXPECT_NE(std::string(error.what()).find("there is no folder " + plan.folder), std::string::npos) << error.what();
  }
}

TEST(Workplace, AStartWithAnotherNumberOfRanksIsPlannedAnew) {
  const TemporaryFolder folder;
  Workplace place(plan_in(folder), {"HOSTNAME=here"}, "", "127.0.0.1");
  const LauncherSettings settings;
  const Guard guard;
  const TeamSetup first = place.setup({.slots = 2, .master_port = 5}, settings, guard, 7);
  EXPECT_EQ(first.commands.size(), 2u);
  EXPECT_EQ(first.memory_fd, 7);
  EXPECT_EQ(first.master_port, 5);
  EXPECT_EQ(first.run_id, "id");
  EXPECT_EQ(first.environment, (EnvironmentBlock{"PATH=/bin", "HOSTNAME=here"}));
  EXPECT_EQ(place.setup({.slots = 3}, settings, guard, 7).commands.size(), 3u);
}

}  // namespace
}  // namespace lockstep::hosts
