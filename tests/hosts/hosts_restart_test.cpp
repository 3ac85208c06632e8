#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "hosts/hosts_launched.h"

// Starts, of runs on several machines, that fail while their agents gather.

namespace lockstep::hosts::restart_test {
namespace {

/// A command that starts agents, and counts them by machine: on machine b, number `fault` of them does `deed` instead.
class FaultyCommand {
 public:
  FaultyCommand(int fault, const std::string& deed) {
    std::ofstream(folder_.path() / "launch")
        << "host=$1; shift\necho x >> " << folder_.path().string() << "/of_$host\ncount=$(wc -l < "
        << folder_.path().string() << "/of_$host)\n[ $host = b ] && [ $count = " << fault << " ] && { " << deed
        << "; }\nexec env LOCKSTEP_MACHINE=$host \"$@\"\n";
  }
  std::vector<std::string> on(const std::string& hosts, const std::vector<std::string>& rest) const {
    std::vector<std::string> words = hosts::on(hosts, rest);
    words[3] = "sh " + (folder_.path() / "launch").string() + " {host}";
    return words;
  }

 private:
  TemporaryFolder folder_;
};

/// Trains in the first start, and ends well in a later one.
std::vector<std::string> program() {
  return {"sh", "-c",
          "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec " + kPageRank + " join train; exec " + kPageRank + " join"};
}

std::vector<std::string> with(std::vector<std::string> words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(HostsRestart, AnAgentThatIsKilledWhileARestartGathersCostsAnotherRestart) {
  for (const auto& elastic : {std::vector<std::string>{}, {"--elastic", "2:2"}}) {
    const FaultyCommand command(2, "kill -9 $$");
    Launched run(command.on("a:1,b:1", with(with(elastic, {"--max-restarts", "2"}), program())));
    ASSERT_TRUE(all_say(run, "training"));
    ::kill(agents_of(run)[1], SIGKILL);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(contains(result.err, "no agent on b: ")) << result.err;
    EXPECT_TRUE(contains(result.err, "(killed by SIGKILL (Killed))")) << result.err;
    EXPECT_TRUE(contains(result.err, "restart 2 of 2")) << result.err;
    EXPECT_TRUE(contains(result.err, "succeeded after 2 restarts")) << result.err;
    EXPECT_TRUE(nothing_left(run));
  }
}

TEST(HostsRestart, AMachineThatIsLostBeforeTheFirstStartIsTriedAgain) {
  const FaultyCommand command(1, "kill -9 $$");
  Launched run(command.on("a:1,b:1", {"--max-restarts", "1", kPageRank, "join"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.err, "restart 1 of 1")) << result.err;
  EXPECT_TRUE(nothing_left(run));
}

TEST(HostsRestart, WithoutABudgetTheFirstStartFailsAsItDid) {
  const FaultyCommand command(1, "kill -9 $$");
  Launched run(command.on("a:1,b:1", {kPageRank, "join"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 46) << result.err;
  EXPECT_TRUE(contains(result.err, "no agent on b: ")) << result.err;
  EXPECT_TRUE(nothing_left(run));
}

/// The budget is used up, or what failed is no accident: either way the block, the report and the events tell.
TEST(HostsRestart, AStartThatIsTheLastEndsAsAnyOther) {
  for (const auto& [deed, budget] : {std::pair{"kill -9 $$", "1"}, {"exit 3", "5"}}) {
    const FaultyCommand command(2, deed);
    Launched run(command.on("a:1,b:1", with({"--max-restarts", budget}, program())));
    ASSERT_TRUE(all_say(run, "training"));
    ::kill(agents_of(run)[1], SIGKILL);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 46) << result.err;
    EXPECT_TRUE(contains(result.err, "rank 1 of 2 was lost with its machine")) << result.err;
    EXPECT_TRUE(contains(result.err, "no restart: the next start failed: no agent on b: ")) << result.err;
    EXPECT_TRUE(contains(result.err, "ends with exit code 46")) << result.err;
    const auto report = nlohmann::json::parse(read_file(run.folder() / "run/report.json"));
    EXPECT_EQ(report["exit_code"], 46);
    std::istringstream events(read_file(run.folder() / "run/events.jsonl"));
    std::string last;
    for (std::string line; std::getline(events, line);) last = line;
    EXPECT_EQ(nlohmann::json::parse(last)["event"], "end") << last;
    EXPECT_TRUE(nothing_left(run));
  }
}

}  // namespace
}  // namespace lockstep::hosts::restart_test
