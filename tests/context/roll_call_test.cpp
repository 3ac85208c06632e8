#include "context/roll_call.h"

#include <gtest/gtest.h>

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error.h"
#include "base/processor.h"
#include "base/version.h"

// The ranks of other machines are played by this one, which writes their introductions.

namespace lockstep {
namespace {

constexpr std::chrono::seconds kTimeout(5);

/// What rank 0 of three throws when the others are `machine version-of-Lockstep version-of-LibTorch "processor" cpus`;
/// "": nothing.
std::string said_of(const std::string& second, const std::string& third) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("present/1", second);
  store->set("present/2", third);
  for (const char* leaving : {"farewells", "gone"}) store->add(leaving, 2);  // they have found it, too
  World world;
  world.world_size = 3;
  try {
    const RollCall present = wait_for_all_ranks(world, store, kTimeout, {{"seed", "4"}, {"backend", "\"\""}});
    EXPECT_EQ(present.machines, 3);
    EXPECT_EQ(present.local_world_size, 1);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(RollCall, OtherVersionsAreNamed) {
  const std::string lockstep = library_version(), torch = TORCH_VERSION;
  const auto rank = [](const std::string& machine, const std::string& its_lockstep, const std::string& its_torch) {
    return machine + " " + its_lockstep + " " + its_torch + " \"" + processor_name() + "\" 0 1";
  };
  const std::string equal = rank("node2", lockstep, torch);
  EXPECT_EQ(said_of(equal, rank("node3", lockstep, torch)), "");
  const std::string other_torch = said_of(equal, rank("node3", lockstep, "2.10.1"));
  EXPECT_NE(other_torch.find("rank 2 on node3 has LibTorch 2.10.1, and rank 0 on "), std::string::npos) << other_torch;
  EXPECT_NE(other_torch.find(" has LibTorch " + torch + "; install the same version on all machines"),
            std::string::npos)
      << other_torch;
  const std::string other_lockstep = said_of(rank("node2", "9.9.9", torch), equal);
  EXPECT_NE(other_lockstep.find("rank 1 on node2 has Lockstep 9.9.9, and rank 0 on "), std::string::npos)
      << other_lockstep;
}

TEST(RollCall, OtherSettingsAreNamed) {
  const std::string rank = " " + std::string(library_version()) + " " TORCH_VERSION " \"\" 0 1 ";
  const std::string same = R"("4" "\"\"")";
  EXPECT_EQ(said_of("node2" + rank + same, "node3" + rank), "");
  EXPECT_EQ(said_of("node2" + rank + same, "node3" + rank + R"("3" "\"\"")"),
            "ContextOptions::seed is 3 on rank 2 and 4 on rank 0; set it alike on all ranks");
  EXPECT_EQ(said_of("node2" + rank + R"("4" "\"gloo\"")", "node3" + rank + same),
            "ContextOptions::backend is \"gloo\" on rank 1 and \"\" on rank 0; set it alike on all ranks");
}

TEST(RollCall, OtherProcessorsAreWarnedOf) {
  const std::string versions = std::string(library_version()) + " " TORCH_VERSION;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(said_of("node2 " + versions + " \"another kind\" 0", "node3 " + versions + " \"\" 0"), "");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("node2, node3 have another processor than "), std::string::npos) << said;
}

}  // namespace
}  // namespace lockstep
