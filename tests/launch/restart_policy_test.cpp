#include "launch/restart_policy.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/launch_error.h"
#include "launch/launched.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr ProcessEnd kKilled{ProcessEnd::Kind::kSignalled, SIGKILL};
constexpr ProcessEnd kCode1{ProcessEnd::Kind::kExited, 1};
constexpr ProcessEnd kLost{ProcessEnd::Kind::kLost, 0};

/// A run that fails again and again.
class FailingRun {
 public:
  explicit FailingRun(RestartLimits limits) : limits_(limits) {}

  struct What {
    int rank = 0;
    ProcessEnd how = kKilled;
    int64_t step = -1;  ///< -1: another one each time
    bool progress = true;
    std::string text = {};
    Clock::duration after = seconds(1);
    int ranks = 4;
    int lost_ranks = 0;
  };
  RestartDecision fail(const What& what) {
    now_ += what.after;
    const int code = what.how == kKilled ? kExitRankKilled : what.how == kLost ? kExitMachineLost : kExitRankFailed;
    const Failure failure{.at = now_,
                          .ranks = what.ranks,
                          .rank = what.rank,
                          .exit_code = code,
                          .how = what.how,
                          .text = what.text,
                          .step = what.step >= 0 ? what.step : 1000 + number_++,
                          .progress = what.progress,
                          .lost_ranks = what.lost_ranks};
    RestartDecision decision = decide_restart(limits_, history, failure);
    if (decision.restart) history.add(failure);
    return decision;
  }

  RestartHistory history;

 private:
  const RestartLimits limits_;
  Clock::time_point now_{std::chrono::hours(100)};
  int64_t number_ = 0;
};

TEST(RestartPolicy, NobodyAskedForRestarts) {
  FailingRun run({});
  const auto decision = run.fail({});
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.why, "");
  EXPECT_FALSE(FailingRun({.in_total = kAnyNumber, .per_hour = 0}).fail({}).restart);
}

TEST(RestartPolicy, ALimitInTotal) {
  FailingRun run({.in_total = 2});
  EXPECT_TRUE(run.fail({}).restart);
  EXPECT_TRUE(run.fail({.after = minutes(600)}).restart);
  const auto decision = run.fail({.after = minutes(600)});
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.why, "all 2 restarts that --max-restarts allows were made");
}

TEST(RestartPolicy, ALimitPerHourLastsForWeeks) {
  FailingRun run({.in_total = kAnyNumber, .per_hour = 3});
  for (int day = 0; day < 30; ++day)
    for (int i = 0; i < 70; ++i) ASSERT_TRUE(run.fail({.rank = i % 4, .after = minutes(21)}).restart);
  EXPECT_LE(run.history.failures.size(), 4U) << "no growth";
  FailingRun bursts({.in_total = kAnyNumber, .per_hour = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bursts.fail({.after = minutes(10)}).restart);
  const auto decision = bursts.fail({.after = minutes(10)});
  EXPECT_FALSE(decision.restart);
  EXPECT_TRUE(contains(decision.why, "3 restarts were made within the last hour")) << decision.why;
}

TEST(RestartPolicy, TheSameErrorInTheSameStepIsABug) {
  const FailingRun::What bug{.rank = 1, .how = kCode1, .step = 7, .text = "index out of range"};
  FailingRun run({.in_total = 10});
  EXPECT_TRUE(run.fail(bug).restart);
  const auto decision = run.fail(bug);
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.why,
            "rank 1 failed twice in step 7 with the same error: this is a bug, which a restart does not repair");
  // Each of these differs in one thing.
  for (int difference = 0; difference < 4; ++difference) {
    FailingRun other({.in_total = 10});
    EXPECT_TRUE(other.fail(bug).restart);
    FailingRun::What what = bug;
    if (difference == 0) what.rank = 2;
    if (difference == 1) what.step = 8;
    if (difference == 2) what.text = "connection reset";
    if (difference == 3) what.how = {ProcessEnd::Kind::kSignalled, SIGSEGV};
    EXPECT_TRUE(other.fail(what).restart) << difference;
    EXPECT_TRUE(other.fail(bug).restart) << difference << ": not in a row";
  }
}

TEST(RestartPolicy, AKillComesFromOutside) {
  FailingRun run({.in_total = 10});
  EXPECT_TRUE(run.fail({.step = 7}).restart);
  for (int time = 1; time < 10; ++time) EXPECT_TRUE(run.fail({.step = 7}).restart) << "it is no bug of the program";
  EXPECT_EQ(run.fail({.step = 7}).why, "all 10 restarts that --max-restarts allows were made");
}

TEST(RestartPolicy, AStartWithoutAStep) {
  const char* const kHopeless =
      "no step was completed since the last start, so another start would fail in the same way";
  FailingRun run({.in_total = 10});
  EXPECT_EQ(run.fail({.how = kCode1, .progress = false}).why, kHopeless);
  for (int start = 0; start < 8; ++start)
    EXPECT_TRUE(run.fail({.rank = start % 4, .progress = false}).restart) << "killed before the first step ever made";
  EXPECT_EQ(run.fail({.rank = 2, .how = kCode1, .progress = false}).why, kHopeless) << "ended by itself";
  EXPECT_TRUE(run.fail({.rank = 2, .how = kCode1}).restart);
  EXPECT_TRUE(run.fail({.rank = 3, .progress = false}).restart);
  EXPECT_EQ(run.fail({.progress = false}).why, "all 10 restarts that --max-restarts allows were made");
}

TEST(RestartPolicy, AKillAtTheMinimumOfAnElasticRun) {
  for (const int code : {kExitRankKilled, kExitOutOfMemory}) {
    RestartHistory history;
    Failure failure{
        .at = Clock::time_point(std::chrono::hours(1)), .ranks = 2, .rank = 1, .exit_code = code, .how = kKilled};
    for (int time = 0; time < 5; ++time) {
      const auto decision = decide_restart({.in_total = 5, .elastic = RankRange{2, 4}}, history, failure);
      EXPECT_TRUE(decision.restart) << decision.why;
      EXPECT_EQ(decision.ranks, 2) << "without it too few would remain";
      history.add(failure);
    }
  }
}

TEST(RestartPolicy, ASignalThatAsksToLeaveMayComeBeforeARankListens) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const ProcessEnd how{ProcessEnd::Kind::kSignalled, signal};
    FailingRun run({.in_total = 10});
    EXPECT_TRUE(run.fail({.how = how, .progress = false}).restart) << "in the first start";
    EXPECT_TRUE(run.fail({.how = how}).restart);
    EXPECT_TRUE(run.fail({.how = how, .progress = false}).restart) << "during the restart";
  }
  FailingRun run({.in_total = 10});
  EXPECT_TRUE(run.fail({}).restart);
  EXPECT_FALSE(run.fail({.how = {ProcessEnd::Kind::kSignalled, SIGSEGV}, .progress = false}).restart);
}

TEST(RestartPolicy, ThePauseBeginsWithNothingAndGrows) {
  FailingRun run({.in_total = kAnyNumber});
  std::vector<int64_t> pauses;
  const auto pause_of = [](FailingRun& of, const FailingRun::What& what) {
    return std::chrono::duration_cast<milliseconds>(of.fail(what).pause).count();
  };
  for (int i = 0; i < 13; ++i) pauses.push_back(pause_of(run, {.rank = i % 4, .progress = false}));
  EXPECT_EQ(pauses, (std::vector<int64_t>{0, 0, 0, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000}));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(pause_of(run, {}), 0) << "steps are made";
  EXPECT_EQ(pause_of(run, {.progress = false}), 0) << "in a row is what counts";
  // Kills in the same step: what is made over and over is no progress.
  FailingRun stuck({.in_total = kAnyNumber});
  pauses.clear();
  for (int i = 0; i < 6; ++i) pauses.push_back(pause_of(stuck, {.step = 7}));
  EXPECT_EQ(pauses, (std::vector<int64_t>{0, 0, 0, 250, 500, 1000}));
  EXPECT_EQ(pause_of(stuck, {.step = 8}), 0);
}

TEST(RestartPolicy, ARankThatFailsTwiceAtItsPlaceIsLeftOut) {
  FailingRun run({.in_total = kAnyNumber, .elastic = RankRange{2, 4}});
  EXPECT_EQ(run.fail({.rank = 3}).ranks, 4);
  EXPECT_EQ(run.fail({.rank = 1}).ranks, 4);
  auto decision = run.fail({.rank = 3});
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.ranks, 3);
  EXPECT_EQ(decision.why, "rank 3 failed twice at its place; it is left out");
  EXPECT_EQ(run.fail({.rank = 1, .ranks = 3}).ranks, 3) << "places are numbered anew";
  EXPECT_EQ(run.fail({.rank = 1, .after = minutes(61), .ranks = 3}).ranks, 3) << "long ago";
  EXPECT_EQ(run.fail({.rank = 1, .ranks = 3}).ranks, 2);
  EXPECT_EQ(run.fail({.rank = 0, .ranks = 2}).ranks, 2);
  EXPECT_EQ(run.fail({.rank = 0, .ranks = 2}).ranks, 2) << "killed from outside, and none can be left out";
  decision = run.fail({.rank = 0, .how = kCode1, .ranks = 2});
  EXPECT_FALSE(decision.restart);
  EXPECT_EQ(decision.exit_code, kExitTooFewRanks);
  EXPECT_EQ(
      decision.why,
      "rank 0 failed twice at its place, and without it fewer than the 2 ranks that --elastic demands would remain");
}

TEST(RestartPolicy, ARankThatCannotEvenStartIsLeftOut) {
  FailingRun run({.in_total = kAnyNumber, .elastic = RankRange{1, 4}});
  EXPECT_TRUE(run.fail({.rank = 2}).restart);
  const auto decision = run.fail({.rank = 2, .how = kCode1, .progress = false});
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.ranks, 3);
}

TEST(RestartPolicy, AMachineThatIsGoneIsLeftOutAtOnceWithAllItsRanks) {
  FailingRun run({.in_total = kAnyNumber, .elastic = RankRange{2, 5}});
  auto decision = run.fail({.rank = 3, .how = kLost, .ranks = 5, .lost_ranks = 2});
  EXPECT_TRUE(decision.restart);
  EXPECT_EQ(decision.ranks, 3);
  EXPECT_EQ(decision.left_out, -1) << "its places are gone already";
  EXPECT_EQ(decision.why, "a machine is gone; its 2 ranks are left out");
  decision = run.fail({.rank = 2, .how = kLost, .progress = false, .ranks = 3, .lost_ranks = 1});
  EXPECT_TRUE(decision.restart) << "the next start is another one";
  EXPECT_EQ(decision.ranks, 2);
  EXPECT_EQ(decision.why, "a machine is gone; its rank is left out");
  // A rank failed, and by the time of the verdict a machine is gone, too.
  FailingRun both({.in_total = kAnyNumber, .elastic = RankRange{1, 4}});
  EXPECT_EQ(both.fail({.rank = 3}).ranks, 4);
  decision = both.fail({.rank = 3, .lost_ranks = 2});
  EXPECT_EQ(decision.ranks, 2) << "the machine's ranks, not one for each reason";
  EXPECT_EQ(decision.left_out, -1);
}

TEST(RestartPolicy, AMachineIsStartedAgainWhereTooFewWouldRemain) {
  for (const auto elastic : {std::optional<RankRange>(), std::optional<RankRange>(RankRange{3, 4})}) {
    FailingRun run({.in_total = 2, .elastic = elastic});
    const FailingRun::What gone{.rank = 2, .how = kLost, .lost_ranks = 2};
    for (int i = 0; i < 2; ++i) {
      const auto decision = run.fail(gone);
      EXPECT_TRUE(decision.restart);
      EXPECT_EQ(decision.ranks, 4) << "a machine that is lost twice has not failed at its place";
      EXPECT_EQ(decision.why, "");
      EXPECT_EQ(decision.exit_code, kExitMachineLost);
    }
    EXPECT_EQ(run.fail(gone).why, "all 2 restarts that --max-restarts allows were made")
        << "a machine counts as a failure";
  }
  FailingRun exact({.in_total = 1, .elastic = RankRange{2, 4}});
  EXPECT_EQ(exact.fail({.rank = 2, .how = kLost, .lost_ranks = 2}).ranks, 2) << "as many as --elastic demands remain";
}

TEST(RestartPolicy, ALossComesFromOutside) {
  const FailingRun::What gone{.rank = 2, .how = kLost, .step = 7, .lost_ranks = 2};
  FailingRun run({.in_total = 10});
  EXPECT_TRUE(run.fail(gone).restart);
  for (int time = 1; time < 10; ++time) EXPECT_TRUE(run.fail(gone).restart);
  FailingRun fresh({.in_total = 10});
  EXPECT_TRUE(fresh.fail({.rank = 2, .how = kLost, .progress = false, .lost_ranks = 2}).restart)
      << "in the first start";
}

TEST(RestartPolicy, ABugIsNotLeftOut) {
  const FailingRun::What bug{.rank = 1, .how = kCode1, .step = 7, .text = "index out of range"};
  FailingRun run({.in_total = 10, .elastic = RankRange{1, 4}});
  EXPECT_TRUE(run.fail(bug).restart);
  EXPECT_TRUE(contains(run.fail(bug).why, "this is a bug"));
}

}  // namespace
}  // namespace lockstep
