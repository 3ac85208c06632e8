#include <gtest/gtest.h>

#include "hosts/hosts_launched.h"
#include "support/listening_ports.h"
#include "support/without_core.h"

// Runs on several machines, which are all this one: each agent has another LOCKSTEP_MACHINE.

namespace lockstep::hosts {
namespace {

using std::chrono::milliseconds;

TEST(HostsRun, RanksKnowTheirPlacesAndMeetInOneStore) {
  for (const auto& [hosts, sum] : {std::pair{"a:1,b:1", "3"}, {"a:2,b:1", "6"}, {"a:1,b:2,c:1", "10"}}) {
    Launched run(on(hosts, {LOCKSTEP_BIN_DIR "/store_rank"}));
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, std::string(sum) + "\n");
    EXPECT_LT(result.seconds, 3);
    EXPECT_TRUE(nothing_left(run));
  }
  Launched run(on("a:2,b:1", {"--tee", "all", "sh", "-c",
                              "sleep 0.$RANK; echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK "
                              "$LOCKSTEP_MACHINE; pwd; env | grep -c LOCKSTEP_ADDRESS"}));
  const auto result = run.wait();
  const std::string folder = run.folder().string() + "\n";
  EXPECT_EQ(run.log(0), "0/3 0/2 0 a\n" + folder + "1\n");
  EXPECT_EQ(run.log(1), "1/3 1/2 0 a\n" + folder + "1\n");
  EXPECT_EQ(run.log(2), "2/3 0/1 1 b\n" + folder + "1\n");
  EXPECT_TRUE(contains(result.out, "[2] 2/3 0/1 1 b\n")) << result.out;
}

TEST(HostsRun, ADryRunTellsWhatItWouldStart) {
  Launched run({"--hosts", "a:2,b:1", "--interface", "10.1.0.0/16", "--dry-run", "sh", "-c", "touch ran"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(std::filesystem::is_empty(run.folder()));
  EXPECT_TRUE(contains(result.out, "a: ranks 0 to 1\n  agent       ssh -o BatchMode=yes a /")) << result.out;
  EXPECT_TRUE(contains(result.out, "/lockstep agent --connect ADDRESS:PORT --node 1 --interface 10.1.0.0/16\n"))
      << result.out;
  EXPECT_TRUE(contains(result.out, "b: rank 2\n")) << result.out;
  EXPECT_TRUE(result.out.ends_with("all ranks\n  command     sh -c 'touch ran'\n")) << result.out;
  const Rendezvous rendezvous;
  const auto by_hand = [&](int node) {
    return Launched(rendezvous.options(2, node, {"-n", "4", "--dry-run", "true"})).wait();
  };
  EXPECT_EQ(by_hand(0).out, "node 0: ranks 0 to 3\n  listens     " + rendezvous.place +
                                "\nnode 1: ranks by its own -n\n  agent       `lockstep run` with --node-rank 1, "
                                "started there by hand or by a scheduler\nall ranks\n  command     true\n");
  EXPECT_EQ(by_hand(1).out, "node 1 of 2: 4 ranks\n  joins       " + rendezvous.place + "\n  command     true\n");
}

/// The first recipe of docs/several_machines.md#a-rank-in-a-debugger.
TEST(HostsRun, ARankMayStartItsDebuggerItself) {
  if (::system("command -v gdb >/dev/null") != 0) GTEST_SKIP() << "SKIPPED BECAUSE there is no gdb";
  const std::string page = read_file(LOCKSTEP_SOURCE_DIR "/docs/several_machines.md");
  const std::string begin = "-- sh -c '", end = "' ./train --epochs 3\n";
  const size_t from = page.find(begin), to = page.find(end, from);
  ASSERT_NE(to, std::string::npos);
  std::string script = page.substr(from + begin.size(), to - from - begin.size());
  ASSERT_NE(script.find("$RANK != 3"), std::string::npos) << script;
  script.replace(script.find("$RANK != 3"), 10, "$RANK != 1");
  Launched run(on("a:1,b:1", {"sh", "-c", script, kPageRank, "join", "1:raise=11", "sleep=60000"}));
  const auto result = run.wait(std::chrono::seconds(60));
  EXPECT_EQ(result.exit_code, 40) << result.err;
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: exit code 255")) << result.err;
  EXPECT_TRUE(contains(run.log(1), "received signal SIGSEGV")) << run.log(1);
  EXPECT_TRUE(contains(result.err, " in main (")) << "its stack is in the block: " << result.err;
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRun, TheKeyIsNowhereToBeSeen) {
  Launched run(on("a:1,b:1", {"sh", "-c", "echo up; exec sleep 60"}));
  ASSERT_TRUE(run.wait_for("up"));
  int seen = 0;
  for (const pid_t pid : run.processes()) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/";
    for (const char* file : {"cmdline", "environ"}) {
      const std::string text = read_file(folder + file);
      size_t digits = 0;
      for (const char c : text) {
        digits = std::isxdigit(static_cast<unsigned char>(c)) != 0 ? digits + 1 : 0;
        ASSERT_LT(digits, 64u) << text;
      }
      ++seen;
    }
  }
  EXPECT_GE(seen, 10);
}

TEST(HostsRun, NobodyListensOnceAllMachinesAreThere) {
  Launched waits({"--hosts", "a:1,b:1", "--launch-command", "sh -c 'exec sleep 60'", "true"});
  EXPECT_TRUE(eventually([&] { return !listening_ports(waits.pid()).empty(); }));
  Launched run(on("a:1,b:2", {kPageRank, "join", "train"}));
  ASSERT_TRUE(run.wait_for("training"));
  const auto pids = run.processes();
  EXPECT_GE(pids.size(), 6U);
  for (const pid_t pid : pids) EXPECT_EQ(listening_ports(pid), std::vector<int>()) << pid;
}

TEST(HostsRun, AFailureEndsAllAndNamesTheMachine) {
  Launched run(on("a:2,b:2", {"sh", "-c", "if [ $RANK = 3 ]; then echo broken; exit 3; fi; exec sleep 60"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_LT(result.seconds, 3);
  EXPECT_TRUE(contains(result.err, "rank 3 of 4 failed first: exit code 3")) << result.err;
  EXPECT_TRUE(contains(result.err, " on b, ")) << result.err;
  EXPECT_TRUE(contains(result.err, "  | broken\n")) << result.err;
  EXPECT_TRUE(contains(read_file(run.folder() / "run/report.json"), "\"host\": \"b\"")) << result.err;
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRun, APageTellsWhoIsToBlame) {
  // Rank 2 fails first, and says that rank 1, on the other machine, is the cause.
  Launched run(
      on("a:2,b:1", {kPageRank, "join", "2:victim_of=1", "2:exit=1", "1:sleep=100", "1:throw", "sleep=60000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_TRUE(contains(result.err, "rank 1 of 3 threw: the words of the exception")) << result.err;
  EXPECT_TRUE(contains(result.err, "on a, ")) << result.err;
}

TEST(HostsRun, AHangIsNamed) {
  Launched run(on("a:1,b:1", {"--hang-timeout", "2", kPageRank, "join", "0:start=7", "0:wait_for=1", "sleep=60000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_LT(result.seconds, 10);
  EXPECT_TRUE(contains(result.err, "rank 1 has not reached all_reduce #7")) << result.err;
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRun, ALotOfOutputArrivesWhole) {
  Launched run(on("a:1,b:1", {"--tee", "1", "sh", "-c", "[ $RANK = 0 ] || seq 400000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.size(), 2688895u);
  EXPECT_TRUE(result.out.ends_with("399999\n400000\n"));
}

TEST(HostsRun, SignalsReachAllRanks) {
  for (const auto& [signal, code] : {std::pair{SIGTERM, 60}, {SIGINT, 130}}) {
    Launched run(on("a:1,b:1", {"--tee", "all", kPageRank, "join", "train"}));
    ASSERT_TRUE(all_say(run, "training"));
    std::this_thread::sleep_for(milliseconds(300));  // until the coordinator has their pages
    ::kill(run.pid(), signal);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_TRUE(nothing_left(run));
  }
}

TEST(HostsRun, ASignalToAnAgentIsOneToTheRun) {
  Launched run(on("a:1,b:1", {"--tee", "all", kPageRank, "join", "train"}));
  ASSERT_TRUE(all_say(run, "training"));
  std::this_thread::sleep_for(milliseconds(300));  // until the coordinator has their pages
  ::kill(agents_of(run).at(1), SIGTERM);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 60) << result.err;
}

TEST(HostsRun, RestartsStartAllMachines) {
  Launched run(on("a:1,b:1", {"--max-restarts", "2", "--tee", "all", kPageRank, "join", "step", "1:first:exit=3",
                              "first:sleep=60000", "say=1"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.err, "succeeded after 1 restart")) << result.err;
  EXPECT_TRUE(all_say(run, "at 1")) << result.out;
}

TEST(HostsRun, AMachineThatIsGoneIsAVerdictOfItsOwn) {
  Launched run(on("a:1,b:2", {kPageRank, "join", "2:start=812", "say=1", "sleep=60000"}));
  ASSERT_TRUE(run.wait_for("at 1"));
  std::this_thread::sleep_for(milliseconds(300));
  ::kill(agents_of(run).at(1), SIGKILL);
  const auto killed = Clock::now();
  const auto result = run.wait();
  EXPECT_LT(seconds_since(killed), 3);
  EXPECT_EQ(result.exit_code, 52);
  EXPECT_TRUE(contains(result.err, "rank 1 of 3 was lost with its machine: b is gone: ")) << result.err;
  EXPECT_TRUE(contains(result.err, "lockstep: b is gone: ")) << result.err;
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRun, APausedAgentIsLostWithinFiveSeconds) {
  Launched run(on("a:1,b:1", {kPageRank, "join", "1:start=812", "say=1", "sleep=60000"}));
  ASSERT_TRUE(run.wait_for("at 1"));
  std::this_thread::sleep_for(milliseconds(300));
  const pid_t paused = agents_of(run).at(1);
  const auto without_core = [&] {
    return testing::seconds_without_core(std::to_string(run.pid())) + testing::seconds_without_core("self");
  };
  const double before = without_core();
  ::kill(paused, SIGSTOP);
  const auto stopped = Clock::now();
  ASSERT_TRUE(run.wait_for("has not been heard of for 4 s; it was in all_reduce #812"));
  EXPECT_LT(seconds_since(stopped) - (without_core() - before), 5.5);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 52);
  EXPECT_TRUE(nothing_left(run)) << "the launch command, which is the agent here, is killed with its ranks";
}

TEST(HostsRun, ALostMachineIsStartedAgainIfTheRunMayRestart) {
  Launched run(on("a:1,b:1", {"--max-restarts", "1", "--tee", "all", kPageRank, "join", "step", "first:say=1",
                              "first:sleep=60000", "say=2"}));
  ASSERT_TRUE(all_say(run, "at 1"));
  std::this_thread::sleep_for(milliseconds(300));
  ::kill(agents_of(run).at(1), SIGKILL);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(all_say(run, "at 2")) << result.out << result.err;
}

TEST(HostsRun, StatusAndStacksTellOfRanksOnOtherMachines) {
  Launched run(on("a:1,b:1", {kPageRank, "join", "start=12", "sleep=60000"}));
  const auto at = [](const std::string& text, const char* mark) { return text.find(mark); };
  std::string status;
  ASSERT_TRUE(eventually([&] {
    status = ask("status", run);
    return at(status, " on a  step 0, in all_reduce #12") != std::string::npos &&
           at(status, " on b  step 0, in all_reduce #12") != std::string::npos;
  })) << status;
  const std::string stacks = ask("stacks", run);
  const size_t first = at(stacks, "=== rank 0, process "), second = at(stacks, "=== rank 1, process ");
  ASSERT_NE(second, std::string::npos) << stacks;
  if (contains(stacks, "neither gdb nor eu-stack")) GTEST_SKIP() << "no program here prints stacks";
  EXPECT_NE(stacks.substr(first, second - first).find("nanosleep"), std::string::npos) << stacks;
  EXPECT_NE(stacks.substr(second).find("nanosleep"), std::string::npos) << stacks;
  EXPECT_TRUE(contains(stacks.substr(second), " on b, step 0, in all_reduce")) << stacks;
}

TEST(HostsRun, TheDoctorMeasuresTheLinksOfEveryPair) {
  for (const auto& [hosts, pairs] : {std::pair{"a,b", 1}, {"a,b,c", 3}, {"a,b,c,d", 6}}) {
    const std::string line = std::string(LOCKSTEP_BIN_DIR "/lockstep doctor --hosts ") + hosts +
                             " --launch-command 'env LOCKSTEP_MACHINE={host}' 2>&1";
    const std::string text = output_of(line);
    EXPECT_EQ(counted(text, "bit/s  "), 2 * pairs) << text;
    EXPECT_TRUE(contains(text, "a - b  ")) << text;
    EXPECT_TRUE(contains(text, " machines reach each other\n")) << text;
    EXPECT_FALSE(contains(text, "not measured")) << text;
  }
  EXPECT_TRUE(contains(output_of(LOCKSTEP_BIN_DIR "/lockstep doctor --hosts a,b --launch-command false 2>&1"),
                       ": `false ...` ended (exit code 1)"));
}

TEST(HostsRun, NothingOutlivesTheCoordinator) {
  Launched run(on("a:2,b:1", {"sh", "-c", "echo up; sleep 60 & exec sleep 60"}));
  ASSERT_TRUE(run.wait_for("up"));
  ::kill(run.pid(), SIGKILL);
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRun, AMachineThatCannotBeReachedIsNamedWithWhatWasSaid) {
  Launched refused({"--hosts", "a:1", "--launch-command", "sh -c 'echo no route to {host} >&2; exit 255'", "true"});
  const auto result = refused.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err,
                       "no agent on a: `sh -c 'echo no route to a >&2; exit 255' ...` ended (exit code 255): "
                       "no route to a"))
      << result.err;
  if (::system("command -v ssh >/dev/null") == 0) {
    Launched by_ssh({"--hosts", "127.0.0.1:1", "--launch-command", "ssh -o BatchMode=yes -p 1 {host}", "true"});
    const auto unreached = by_ssh.wait();
    EXPECT_EQ(unreached.exit_code, 46);
    EXPECT_TRUE(contains(unreached.err,
                         "no agent on 127.0.0.1: `ssh -o BatchMode=yes -p 1 127.0.0.1 ...` ended (exit "
                         "code 255): ssh: connect to host 127.0.0.1 port 1: Connection refused"))
        << unreached.err;
  }
  Launched silent({"--hosts", "a:1,b:1", "--launch-command", "sh -c 'exec sleep 60'", "true"},
                  {.environment = {"LOCKSTEP_JOIN_TIMEOUT_S=1"}});
  const auto waited = silent.wait();
  EXPECT_EQ(waited.exit_code, 46);
  EXPECT_TRUE(contains(waited.err, "a, b of 2 machines did not arrive within 1 s")) << waited.err;
  EXPECT_TRUE(nothing_left(silent));
}

TEST(HostsRun, AProgramThatIsMissingThereIsNamed) {
  Launched run(on("a:1,b:1", {"--env", "PATH=/nowhere", "true"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 46);
  EXPECT_TRUE(contains(result.err, "no program 'true' in PATH")) << result.err;
}

}  // namespace
}  // namespace lockstep::hosts
