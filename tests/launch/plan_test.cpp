#include "launch/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

int exit_code_of_throw(const std::function<void()>& call) {
  try {
    call();
  } catch (const LaunchError& error) {
    return error.exit_code;
  }
  return 0;
}

TEST(Plan, RankCount) {
  EXPECT_EQ(parse_rank_count("-n", "1", 2), 1);
  EXPECT_EQ(parse_rank_count("-n", "64", 2), 64);
  EXPECT_EQ(parse_rank_count("-n", "auto", 2), 2);
  for (const char* bad : {"0", "-1", "", "2x", " 2", "1.5", "+3", "99999999999999", "4097", "AUTO"})
    EXPECT_EQ(exit_code_of_throw([&] { parse_rank_count("-n", bad, 2); }), kExitBadCommandLine) << bad;
}

TEST(Plan, ARankOfSeveralMachinesKnowsItsMachine) {
  const EnvironmentBlock block = rank_environment({"LOCKSTEP_ADDRESS=stale"}, {.rank = 3,
                                                                               .world_size = 4,
                                                                               .local_rank = 1,
                                                                               .local_world_size = 2,
                                                                               .node = 1,
                                                                               .nodes = 2,
                                                                               .address = "10.0.0.2",
                                                                               .master_address = "10.0.0.1",
                                                                               .master_port = 4000});
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{{"RANK", "3"},
                                                                                    {"LOCAL_RANK", "1"},
                                                                                    {"LOCAL_WORLD_SIZE", "2"},
                                                                                    {"GROUP_RANK", "1"},
                                                                                    {"GROUP_WORLD_SIZE", "2"},
                                                                                    {"LOCKSTEP_ADDRESS", "10.0.0.2"},
                                                                                    {"MASTER_ADDR", "10.0.0.1"},
                                                                                    {"MASTER_PORT", "4000"}})
    EXPECT_EQ(find_variable(block, name, ""), value) << name;
}

TEST(Plan, ARankKnowsItsPlaceAndNoOtherLaunchers) {
  const EnvironmentBlock inherited = {
      "HOME=/home/a",         "RANK=7",       "MASTER_ADDR=elsewhere", "MASTER_PORT=29500", "RANKING=stays", "EMPTY=",
      "LOCKSTEP_TERMINAL=80", "WORLD_SIZE=9", "LOCAL_RANK=7",          "ODD_WITH_NO_EQUALS"};
  EnvironmentBlock block = rank_environment(inherited, {.rank = 1,
                                                        .world_size = 3,
                                                        .run_dir = "/r",
                                                        .store_fd = 9,
                                                        .page_fd = 10,
                                                        .memory_fd = 11,
                                                        .error_file = "/r/e",
                                                        .restarts = 1,
                                                        .max_restarts = 2,
                                                        .run_id = "lockstep-5-6",
                                                        .threads = 4});
  EnvironmentBlock expected = {"HOME=/home/a",
                               "RANKING=stays",
                               "EMPTY=",
                               "ODD_WITH_NO_EQUALS",
                               "RANK=1",
                               "WORLD_SIZE=3",
                               "LOCAL_RANK=1",
                               "LOCAL_WORLD_SIZE=3",
                               "GROUP_RANK=0",
                               "GROUP_WORLD_SIZE=1",
                               "ROLE_RANK=1",
                               "ROLE_WORLD_SIZE=3",
                               "ROLE_NAME=default",
                               "LOCKSTEP_RUN_DIR=/r",
                               "LOCKSTEP_STORE_FD=9",
                               "LOCKSTEP_PAGE_FD=10",
                               "LOCKSTEP_MEMORY_FD=11",
                               "TORCHELASTIC_ERROR_FILE=/r/e",
                               "OMP_NUM_THREADS=4",
                               "LOCKSTEP_THREADS=4",
                               "TORCHELASTIC_RUN_ID=lockstep-5-6",
                               "TORCHELASTIC_RESTART_COUNT=1",
                               "TORCHELASTIC_MAX_RESTARTS=2"};
  std::sort(block.begin(), block.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(block, expected);
  block = rank_environment(inherited, {.terminal_columns = 120});
  EXPECT_EQ(std::count(block.begin(), block.end(), "LOCKSTEP_TERMINAL=120"), 1);
}

TEST(Plan, ANumberOfThreadsThatTheUserHasSetStays) {
  const auto of = [](const EnvironmentBlock& inherited, const char* name) {
    return find_variable(rank_environment(inherited, {.threads = 4}), name, "unset");
  };
  EXPECT_EQ(of({"OMP_NUM_THREADS=2"}, "OMP_NUM_THREADS"), "2");
  EXPECT_EQ(of({"OMP_NUM_THREADS=2"}, "LOCKSTEP_THREADS"), "unset");
  EXPECT_EQ(of({"OMP_NUM_THREADS=8", "LOCKSTEP_THREADS=8"}, "OMP_NUM_THREADS"), "4") << "of a launcher around this one";
  EXPECT_EQ(of({"OMP_NUM_THREADS=2", "LOCKSTEP_THREADS=8"}, "OMP_NUM_THREADS"), "2") << "set below that launcher";
  EXPECT_EQ(of({"OMP_NUM_THREADS="}, "OMP_NUM_THREADS"), "4");
}

TEST(Plan, RanksOfTorchrunsWords) {
  EXPECT_EQ(parse_rank_count("-n", "cpu", 3), 3);
  EXPECT_EQ(parse_rank_count("-n", "gpu", 3, 2), 2);
  EXPECT_EQ(exit_code_of_throw([] { parse_rank_count("-n", "gpu", 3, 0); }), kExitBadCommandLine);
}

TEST(Plan, FindsVariables) {
  const EnvironmentBlock block = {"PATHS=no", "PATH=/bin", "EMPTY="};
  EXPECT_EQ(find_variable(block, "PATH", "x"), "/bin");
  EXPECT_EQ(find_variable(block, "EMPTY", "x"), "");
  EXPECT_EQ(find_variable(block, "HOME", "x"), "x");
}

TEST(Plan, FindsPrograms) {
  EXPECT_EQ(find_program("sh", "/nowhere:/bin"), "/bin/sh");
  EXPECT_EQ(find_program("/bin/sh", ""), "/bin/sh");
  for (const char* bad : {"no-such-program", "./no-such-program", "/", "/etc/passwd", "passwd", ""})
    EXPECT_EQ(exit_code_of_throw([&] { find_program(bad, "/nowhere:/etc"); }), kExitNotStarted) << bad;
}

TEST(Plan, NamesRunFolders) {
  const std::string name = default_run_dir("/opt/bin/train", std::chrono::system_clock::now(), 4711);
  EXPECT_EQ(name.size(), std::string("runs/20240131-235959-train-4711").size());
  EXPECT_TRUE(name.starts_with("runs/20"));
  EXPECT_TRUE(name.ends_with("-train-4711"));
}

TEST(Plan, SharesOutTheCores) {
  const std::vector<int> cpus{0, 1, 4, 5, 6};
  EXPECT_EQ(place_rank(Binding::kNone, cpus, {}, 1, 2).cpus, std::vector<int>{});
  EXPECT_EQ(place_rank(Binding::kCore, cpus, {}, 0, 2).cpus, (std::vector<int>{0, 1}));
  EXPECT_EQ(place_rank(Binding::kCore, cpus, {}, 1, 2).cpus, (std::vector<int>{4, 5}));
  EXPECT_EQ(place_rank(Binding::kCore, cpus, {}, 4, 5).cpus, std::vector<int>{6});
  EXPECT_EQ(exit_code_of_throw([&] { place_rank(Binding::kCore, cpus, {}, 0, 6); }), kExitBadCommandLine);
}

TEST(Plan, SpreadsRanksOverNumaNodes) {
  using Cpus = std::vector<int>;
  const std::vector<NumaNode> nodes = {{0, {0, 1, 8, 9}}, {1, {2, 3, 10, 11}}, {3, {4, 5}}};
  const Cpus usable{0, 1, 2, 3, 8};  // of the last node nothing
  const auto place = [&](int rank, int ranks) { return place_rank(Binding::kNuma, usable, nodes, rank, ranks); };
  EXPECT_EQ(usable_nodes(nodes, usable).size(), 2u);
  EXPECT_EQ(place(0, 2).cpus, (Cpus{0, 1, 8}));
  EXPECT_EQ(place(0, 2).memory_node, 0);
  EXPECT_EQ(place(1, 2).cpus, (Cpus{2, 3}));
  EXPECT_EQ(place(1, 2).memory_node, 1);
  for (const auto& [rank, node] : {std::pair{0, 0}, {1, 0}, {2, 1}}) EXPECT_EQ(place(rank, 3).memory_node, node);
  EXPECT_EQ(place(0, 1).cpus, (Cpus{0, 1, 2, 3, 8})) << "one rank has both nodes";
  EXPECT_EQ(place(0, 1).memory_node, -1);
  EXPECT_EQ(place_rank(Binding::kNuma, {0, 1}, nodes, 0, 2).cpus, Cpus{}) << "one usable node: nothing to choose";
}

TEST(Plan, VariablesReplaceThoseOfTheSameName) {
  const EnvironmentBlock block = with_variables({"A=1", "B=2", "AB=3"}, {"A=4", "C=", "A=5"});
  EXPECT_EQ(block, (EnvironmentBlock{"B=2", "AB=3", "C=", "A=5"}));
}

TEST(Plan, WarnsOfMoreRanksThanCores) {
  EXPECT_EQ(oversubscription_warning(2, 2, 1), "");
  EXPECT_EQ(oversubscription_warning(8, 2, 1), "8 ranks share 2 usable cores; each computes with 1 thread");
}

}  // namespace
}  // namespace lockstep
