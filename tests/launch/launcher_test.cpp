#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/usable_cores.h"
#include "launch/launched.h"
#include "launch/process/numa.h"

// What `lockstep run` gives its ranks, and what it refuses.

namespace lockstep {
namespace {

namespace fs = std::filesystem;

TEST(Launcher, LeavesNothingWhereNothingWasPrinted) {
  Launched run({"-n", "2", "--", "true"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out + result.err, "");
  EXPECT_TRUE(fs::is_empty(run.folder()));
  EXPECT_TRUE(run.processes().empty());
}

TEST(Launcher, TellsEveryRankItsPlace) {
  for (const int ranks : {1, 2, 3}) {
    Launched run({"-n", std::to_string(ranks), "--run-dir", "run", "sh", "-c",
                  "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR:${#MASTER_PORT} $LOCKSTEP_RUN_DIR "
                  "$ROLE_RANK $GROUP_RANK $GROUP_WORLD_SIZE [$LOCKSTEP_TERMINAL] $KEPT"},
                 {.environment = {"RANK=9", "WORLD_SIZE=9", "MASTER_ADDR=a", "MASTER_PORT=1", "GROUP_RANK=5",
                                  "LOCKSTEP_TERMINAL=5", "KEPT=kept"}});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0);
    const auto line = [&](int rank) {
      const std::string place = std::to_string(rank) + " " + std::to_string(ranks);
      return place + " " + place + " 127.0.0.1:5 " + (run.folder() / "run").string() + " " + std::to_string(rank) +
             " 0 1 [] kept\n";
    };
    EXPECT_EQ(result.out, line(0));
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(run.log(rank), line(rank));
  }
}

TEST(Launcher, ServesTheStore) {
  for (const int ranks : {1, 2, 3, 8}) {
    Launched run({"-n", std::to_string(ranks), "--run-dir", "run", LOCKSTEP_BIN_DIR "/store_rank"});
    EXPECT_EQ(run.wait().exit_code, 0);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(run.log(rank), std::to_string(ranks * (ranks + 1) / 2) + "\n");
  }
}

TEST(Launcher, ARankInheritsItsStoreItsPageMemoryForItsStateAndNothingElseOfTheLaunchers) {
  // The shell opens a descriptor to list the folder, and has closed it when it tests the names.
  Launched run({"-n", "3", "--run-dir", "run", "sh", "-c",
                "for fd in /proc/$$/fd/*; do [ -L $fd ] && echo ${fd##*/}; done; echo $LOCKSTEP_STORE_FD; echo "
                "$LOCKSTEP_PAGE_FD; echo $LOCKSTEP_MEMORY_FD"});
  EXPECT_EQ(run.wait().exit_code, 0);
  for (int rank = 0; rank < 3; ++rank) {
    std::istringstream log(run.log(rank));
    std::vector<int> numbers{std::istream_iterator<int>(log), {}};
    ASSERT_GT(numbers.size(), 3U);
    std::vector<int> expected = {0, 1, 2, numbers.end()[-3], numbers.end()[-2], numbers.end()[-1]};
    numbers.resize(numbers.size() - 3);
    std::sort(numbers.begin(), numbers.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(numbers, expected) << "rank " << rank;
  }
}

TEST(Launcher, InputGoesToRankZero) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "cat; echo end"}, {.input = "hello\n"});
  const auto result = run.wait();
  EXPECT_EQ(result.out, "hello\nend\n");
  EXPECT_EQ(run.log(1), "end\n");
}

TEST(Launcher, LeavesTheProgramsArgumentsAlone) {
  const std::vector<std::string> arguments = {"-n", "7", "--run-dir=x", "--", "-h", "", "--version", "a b"};
  for (const bool separator : {false, true}) {
    std::vector<std::string> words = {"--nproc_per_node=1", "--no-python", "--standalone"};
    if (separator) words.push_back("--");
    words.insert(words.end(), {"printf", "<%s>"});
    words.insert(words.end(), arguments.begin(), arguments.end());
    EXPECT_EQ(Launched(words).wait().out, "<-n><7><--run-dir=x><--><-h><><--version><a b>");
  }
}

TEST(Launcher, RefusesBadCommandLines) {
  const std::vector<std::vector<std::string>> bad = {
      {},
      {"-n"},
      {"-n", "0", "true"},
      {"-n", "-1", "true"},
      {"-n", "2"},
      {"-n", "2", "--"},
      {"-n", "two", "true"},
      {"--no-such-option", "true"},
      {"--bind", "moon", "true"},
      {"-n", "4096", "--bind", "core", "true"},
  };
  for (const auto& words : bad) {
    const auto result = Launched(words).wait();
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(words);
    EXPECT_TRUE(contains(result.err, "Usage: lockstep run")) << result.err;
  }
  EXPECT_TRUE(contains(Launched({"--no-such-option", "true"}).wait().err, "--no-such-option"));
}

TEST(Launcher, RefusalsNameOptionValueAndAdvice) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> bad = {
      {{"--max-restarts", "-1", "true"}, "--max-restarts takes a whole number from 0 to 1000; it got '-1'"},
      {{"--grace", "soon", "true"}, "--grace takes a number of seconds from 0.001 to 604800; it got 'soon'"},
      {{"--hang_timeout=0", "true"},
       "--hang-timeout takes a number of seconds from 0.001 to 604800, or off; it got '0'"},
      {{"-n", "2", "--tee", "3", "true"}, "--tee takes all, or ranks from 0 to 1 such as 0 or 0,2-5; it got '3'"},
      {{"--env", "A", "true"}, "--env takes NAME=value; it got 'A'"},
      {{"--env", "WORLD_SIZE=2", "true"}, "WORLD_SIZE is set by the launcher"},
      {{"--debugger", "1", "true"}, "--debugger takes a whole number from 0 to 0; it got '1'"},
      {{"--debugger", "0", "true"}, "--debugger needs the terminal, but stdin is not one"},
      {{"--nnodes=2", "true"}, "--node-rank is missing; --nnodes, --node-rank and --rendezvous belong together"},
      {{"--rdzv-endpoint=a:1", "true"}, "several machines meet by --hosts, or by --rendezvous HOST:PORT"},
      {{"--hosts", "a:0", "true"}, "--hosts a takes a whole number from 1 to 4096; it got '0'"},
      {{"--hosts", "a:1,a:2", "true"}, "--hosts: a is named twice; name each machine once, with all its ranks"},
      {{"--hosts", "a:1", "--launch-command", " ", "true"}, "--launch-command is empty"},
      {{"--hosts", "a:1,b:1", "--elastic", "3:4", "true"}, "the machines have 2 ranks, but --elastic allows 3 to 4"},
      {{"--hosts", "a:1", "--debugger", "0", "true"}, "--debugger works on one machine only"},
      {{"--bind", "cores", "true"}, "--bind takes none, core or numa; it got 'cores'; did you mean core?"},
      {{"-n", "2", "-n", "3", "true"}, "-n is given twice; leave one out"},
      {{"-n2", "--nproc_per_node=3", "true"}, "--nproc-per-node and -n are the same option; leave one out"},
      {{"--run-dir", "a", "--log-dir", "b", "true"}, "--log-dir and --run-dir are the same option"},
      {{"--hang-timeot", "5", "true"}, "there is no option --hang-timeot; did you mean --hang-timeout?"},
      {{"--max_restart=5", "true"}, "there is no option --max-restart; did you mean --max-restarts?"},
      {{"--colour", "true"}, "there is no option --colour\n"},
      {{"--nproc-per-node=gpu", "true"}, "-n gpu: no GPU is visible; give a number, or auto for the cores"},
  };
  for (const auto& [words, text] : bad) {
    Launched run(words, {.environment = {"CUDA_VISIBLE_DEVICES="}});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_TRUE(contains(result.err, text)) << result.err;
    EXPECT_TRUE(fs::is_empty(run.folder()));
  }
}

TEST(Launcher, TakesBothSpellings) {
  for (const bool underscores : {false, true}) {
    std::vector<std::string> words = {"--nproc-per-node", "2",   "--max-restarts=3", "--hang-timeout", "off",
                                      "--log-dir",        "run", "--no-python",      "--standalone",   "--tee=0",
                                      "--grace",          "0.5"};
    for (auto& word : words)
      if (underscores && word.starts_with("--")) std::replace(word.begin() + 2, word.end(), '-', '_');
    words.insert(words.end(), {"--env", "A_B=c-d", "--env=E=", "sh", "-c", "echo $A_B [$E] ${E-unset}"});
    Launched run(words);
    EXPECT_EQ(run.wait().out, "c-d []\n");
    EXPECT_EQ(run.log(1), "c-d []\n");
    Launched dry({underscores ? "--dry_run" : "--dry-run", underscores ? "--run_dir=d" : "--run-dir=d", "true"});
    EXPECT_TRUE(contains(dry.wait().out, " LOCKSTEP_RUN_DIR=d "));
  }
}

TEST(Launcher, CommandsAndTheirOptionsHaveTheirOwnWords) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"rnu", "unknown command 'rnu'; did you mean run?\nUsage: lockstep COMMAND"},
      {"sing", "unknown command 'sing'\n"},
      {"doctor --jsn", "`lockstep doctor` has no option --jsn; did you mean --json?\n`lockstep doctor --help` lists"},
      {"inspect --x", "`lockstep inspect` has no option --x\n"},
  };
  for (const auto& [words, text] : bad) {
    // Where the launcher would be, before it reads its own command line.
    const auto result = Launched({"true"}, {.before = LOCKSTEP_BIN_DIR "/lockstep " + words + "; exit $?"}).wait();
    EXPECT_EQ(result.exit_code, 2) << words;
    EXPECT_TRUE(contains(result.err, text)) << result.err;
    EXPECT_FALSE(contains(result.err, "PROGRAM")) << result.err;
  }
}

TEST(Launcher, RanksHaveTorchrunsRunIdAndTheirShareOfTheCores) {
  const std::string print = "echo $TORCHELASTIC_RUN_ID $OMP_NUM_THREADS";
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", print});
  EXPECT_EQ(run.wait().exit_code, 0);
  const int share = threads_per_rank({allowed_cpus(), allowed_cpus()}, 0, cgroup_cpu_quota());
  EXPECT_TRUE(run.log(0).starts_with("lockstep-")) << run.log(0);
  EXPECT_TRUE(run.log(0).ends_with(" " + std::to_string(share) + "\n")) << run.log(0);
  EXPECT_EQ(run.log(0), run.log(1)) << "one name for all";
  for (const bool option : {false, true}) {
    std::vector<std::string> words = {"-n", "2", "sh", "-c", "echo $OMP_NUM_THREADS [$LOCKSTEP_THREADS]"};
    if (option) words.insert(words.begin(), {"--env", "OMP_NUM_THREADS=7"});
    Launched::Options around;
    if (!option) around.environment = {"OMP_NUM_THREADS=7"};
    EXPECT_EQ(Launched(words, around).wait().out, "7 []\n");
  }
}

TEST(Launcher, DryRunTellsAndStartsNothing) {
  Launched run({"-n", "2", "--bind", "core", "--max-restarts", "3", "--log-dir", "run", "--dry-run", "sh", "-c",
                "touch ran; echo it's"});
  const auto result = run.wait();
  if (allowed_cpus().size() < 2) GTEST_SKIP() << "needs two cores";
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(fs::is_empty(run.folder()));
  EXPECT_TRUE(contains(result.out, "rank 1\n  program     /usr/bin/sh\n") ||
              contains(result.out, "rank 1\n  program     /bin/sh\n"))
      << result.out;
  EXPECT_TRUE(contains(result.out, "command     sh -c 'touch ran; echo it'\\''s'\n")) << result.out;
  EXPECT_TRUE(contains(result.out, " RANK=1 WORLD_SIZE=2 ")) << result.out;
  for (const char* variable :
       {" LOCKSTEP_STORE_FD=(a descriptor) ", " LOCKSTEP_PAGE_FD=(a descriptor) ",
        " LOCKSTEP_MEMORY_FD=(a descriptor) ", " MASTER_ADDR=127.0.0.1 ", " MASTER_PORT=(a free port) ",
        " TORCHELASTIC_ERROR_FILE=run/rank_1_error.json ", " TORCHELASTIC_RUN_ID=(a new name) ",
        " TORCHELASTIC_MAX_RESTARTS=3\n", " OMP_NUM_THREADS=1 "})
    EXPECT_TRUE(contains(result.out, variable)) << variable << result.out;
  EXPECT_FALSE(contains(result.out, "PATH=")) << "what is inherited is not shown";
  EXPECT_TRUE(contains(result.out, "  cpus        " + std::to_string(allowed_cpus()[0]))) << result.out;
  EXPECT_EQ(Launched({"--dry-run", "no-such-program"}).wait().exit_code, 46);
}

TEST(Launcher, BindNumaOnOneNodeGoesOn) {
  if (numa_nodes().size() > 1) GTEST_SKIP() << "this machine has several NUMA nodes";
  const auto result = Launched({"-n", "2", "--bind", "numa", "echo", "on"}).wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "on\n");
  EXPECT_TRUE(contains(result.err, "--bind numa changes nothing")) << result.err;
}

TEST(Launcher, HelpNamesOptionsAndExitCodes) {
  const auto result = Launched({"--help"}).wait();
  EXPECT_EQ(result.exit_code, 0);
  for (const char* part : {"--run-dir", "--nproc-per-node", "40", "48", "130"}) EXPECT_TRUE(contains(result.out, part));
}

TEST(Launcher, BindsEachRankToItsOwnCores) {
  if (allowed_cpus().size() < 2) GTEST_SKIP() << "needs two cores";
  Launched two({"-n", "2", "--bind", "core", "--run-dir", "run", "sh", "-c", "taskset -cp $$ | sed 's/.*: //'"});
  const auto result = two.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto half = allowed_cpus().size() / 2;
  EXPECT_EQ(std::stoi(two.log(0)), allowed_cpus()[0]);
  EXPECT_EQ(std::stoi(two.log(1)), allowed_cpus()[half]);
}

TEST(Launcher, WarnsOfMoreRanksThanCoresAndGoesOn) {
  const auto result = Launched({"-n", "32", "true"},
                               {.before = "taskset -cp $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//') $$ >/dev/null"})
                          .wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "lockstep: 32 ranks share 1 usable core; each computes with 1 thread\n");
}

TEST(Launcher, AProgramThatIsNotThereStartsNothing) {
  for (const char* program : {"no-such-program", "./no-such-program", "/etc/passwd", "/"}) {
    Launched run({"-n", "2", program});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 46) << result.err;
    EXPECT_TRUE(contains(result.err, program)) << result.err;
    EXPECT_TRUE(fs::is_empty(run.folder()));
  }
  EXPECT_TRUE(contains(Launched({"no-such-program"}).wait().err, "/usr/local/bin:/usr/bin:/bin"));
}

TEST(Launcher, AProgramThatCannotBeExecutedIsNamed) {
  Launched run({"-n", "2", "./program"}, {.before = "echo garbage > program; chmod +x program"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err, "./program")) << result.err;
  EXPECT_TRUE(contains(result.err, "#! line")) << result.err;
}

TEST(Launcher, AMissingLibraryCountsAsNotStarted) {
  // A program that is linked to a library which is no longer there.
  Launched run(
      {"-n", "2", "./program"},
      {.before = "echo 'int f(void) { return 0; }' > f.c; echo 'int f(void); int main(void) { return f(); }' > m.c; "
                 "${CC:-cc} -shared -fPIC -o libnot_there.so f.c && ${CC:-cc} -o program m.c -L. -lnot_there; "
                 "rm libnot_there.so"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err, " of 2 could not start: the library libnot_there.so is missing\n")) << result.err;
}

TEST(Launcher, AnUnusableRunFolderStartsNothing) {
  Launched run({"-n", "2", "--run-dir", "file/run", "sh", "-c", "echo ran > ../ran"}, {.before = "echo > file"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 48);
  EXPECT_TRUE(contains(result.err, "file/run")) << result.err;
  EXPECT_FALSE(fs::exists(run.folder() / "ran"));
}

TEST(Launcher, LogsOfAnEarlierRunInTheFolderAreKept) {
  Launched run({"--run-dir", "run", "echo", "new"}, {.before = "mkdir run; echo old > run/rank_0.log"});
  EXPECT_EQ(run.wait().exit_code, 0);
  EXPECT_TRUE(run.stamped_log(0).starts_with("old\n20")) << run.stamped_log(0);
  EXPECT_TRUE(run.stamped_log(0).ends_with("Z new\n")) << run.stamped_log(0);
}

/// Several rounds, since the machine may be busy now and then, but no more than needed.
double best_seconds(const std::vector<std::string>& words, double wanted) {
  constexpr int kRounds = 30;
  double best = 1e9;
  for (int round = 0; round < kRounds && best >= wanted; ++round) {
    const auto result = Launched(words).wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    best = std::min(best, result.seconds);
  }
  return best;
}

TEST(Launcher, ManyRanksStartInUnderASecond) {
  Launched run({"-n", "64", "--run-dir", "run", "sh", "-c", "echo $RANK"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  for (int rank = 0; rank < 64; ++rank) EXPECT_EQ(run.log(rank), std::to_string(rank) + "\n");
  EXPECT_TRUE(run.processes().empty());
  // From the launcher's start to its end.
  EXPECT_LT(best_seconds({"-n", "64", "sh", "-c", "echo $RANK"}, 1), 1);
  EXPECT_LT(best_seconds({"-n", "8", "true"}, 0.1), 0.1);
}

TEST(Launcher, TooFewDescriptorsAreALimitToldInNumbers) {
  for (const char* limit : {"32", "20", "12", "9"}) {
    Launched run({"-n", "8", "--run-dir", "run", "true"}, {.before = std::string("ulimit -n ") + limit});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 50) << limit << result.err;
    EXPECT_TRUE(contains(result.err, std::string("but this process may have ") + limit + " (ulimit -n) and has "))
        << result.err;
    EXPECT_TRUE(contains(result.err, " open. Allow at least ")) << result.err;
  }
  EXPECT_EQ(Launched({"-n", "8", "true"}, {.before = "ulimit -n 70"}).wait().exit_code, 0);
}

TEST(Launcher, TheNextCommandCanBePasted) {
  Launched run({"-n", "1", "--run-dir", "run", "sh", "-c", "printf %s \"$1\" > word; exit 3", "sh", "a\nb'\x1b[1m"});
  const auto result = run.wait();
  const size_t at = result.err.find("  next      ") + 12;
  const std::string command = result.err.substr(at, result.err.find('\n', at) - at);
  fs::remove(run.folder() / "word");
  std::ofstream(run.folder() / "again.sh") << "cd " << run.folder().string() << " && " << command << " 2>/dev/null\n";
  EXPECT_EQ(std::system(("bash " + (run.folder() / "again.sh").string()).c_str()) >> 8, 40) << command;
  EXPECT_EQ(read_file(run.folder() / "word"), "a\nb'\x1b[1m");
}

}  // namespace
}  // namespace lockstep
