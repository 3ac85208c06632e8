#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <random>

#include "launch/launch_error.h"
#include "launch/simulation.h"

// Runs whose number of ranks changes, with the test's own clock.

namespace lockstep::simulation {
namespace {

void new_team(Simulation& run) { run.ranks.assign(static_cast<size_t>(run.state().settings.ranks), RankView{}); }

/// All ranks train, and ask for stops.
void train_and_ask(Simulation& run) {
  for (auto& rank : run.ranks) rank.account.stop_calls = 3;
  train(run);
}

/// All ranks see the request, save, and leave.
std::vector<Kind> leave(Simulation& run) {
  run.stop_asked = true;
  run.stop_at = 4;
  for (auto& rank : run.ranks) rank.account.stop_calls = 4;
  run.look();
  std::vector<Kind> kinds;
  for (size_t rank = 0; rank < run.ranks.size(); ++rank)
    kinds = run.end(static_cast<int>(rank), exited(kExitPreempted));
  run.stop_asked = false;
  run.stop_at = 0;
  return kinds;
}

TEST(ElasticState, ResizesBetweenTwoSteps) {
  for (const int wanted : {2, 4}) {
    Simulation run({.ranks = 3, .elastic = RankRange{2, 4}});
    train_and_ask(run);
    run.resize_to = wanted;
    EXPECT_EQ(run.look(), Kinds{Kind::kAskToLeave});
    EXPECT_EQ(leave(run), Kinds{Kind::kGatherEvidence});
    EXPECT_TRUE(run.state().is_resizing());
    run.resize_to = 0;
    EXPECT_EQ(*run.state().wake_at(), run.now()) << "at once";
    EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
    EXPECT_EQ(run.state().settings.ranks, wanted);
    EXPECT_EQ(run.state().restarts, 1);
    EXPECT_EQ(run.state().history.restarts, 0) << "it costs no restart";
    new_team(run);
    train(run);
    for (int rank = 0; rank < wanted; ++rank) run.end(rank, exited(0));
    EXPECT_EQ(run.state().phase, Phase::kOver);
    EXPECT_EQ(run.code(), kExitOk);
  }
}

TEST(ElasticState, AResizeThatCannotBeIsNone) {
  Simulation rigid({.ranks = 3});
  train_and_ask(rigid);
  rigid.resize_to = 2;
  EXPECT_EQ(rigid.look(), Kinds{});
  Simulation run({.ranks = 3, .elastic = RankRange{2, 4}});
  train_and_ask(run);
  for (const int wanted : {0, 1, 3, 5, -1}) {
    run.resize_to = wanted;
    EXPECT_EQ(run.look(), Kinds{}) << wanted;
  }
  Simulation deaf({.ranks = 3, .elastic = RankRange{2, 4}});
  train(deaf);
  deaf.resize_to = 2;
  EXPECT_EQ(deaf.look(), Kinds{}) << "the program does not ask for stops";
  EXPECT_EQ(deaf.state().phase, Phase::kRunning);
}

TEST(ElasticState, ARunThatIsDoneMeanwhileIsDone) {
  Simulation run({.ranks = 2, .elastic = RankRange{2, 4}});
  train_and_ask(run);
  run.resize_to = 4;
  EXPECT_EQ(run.look(), Kinds{Kind::kAskToLeave});
  run.end(0, exited(0));
  EXPECT_EQ(run.end(1, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_EQ(run.code(), kExitOk);
}

TEST(ElasticState, RanksThatDoNotSaveAreNotStartedAgain) {
  Simulation run({.ranks = 2, .elastic = RankRange{2, 4}});
  train_and_ask(run);
  run.resize_to = 4;
  run.look();
  run.stop_asked = true;
  run.stop_at = 4;
  for (auto& rank : run.ranks) rank.account.stop_calls = 4;
  run.look();
  run.end(0, exited(0));
  EXPECT_EQ(run.end(1, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_EQ(run.code(), kExitPreemptedUnsaved);
  EXPECT_TRUE(contains(run.said, "left without saving")) << run.said;
}

TEST(ElasticState, AFailureDuringAResizeRestartsWithTheNewNumber) {
  Simulation run({.ranks = 3, .max_restarts = 1, .elastic = RankRange{2, 4}});
  train_and_ask(run);
  run.resize_to = 4;
  run.look();
  run.stop_asked = true;
  EXPECT_EQ(run.end(1, killed(SIGKILL)), Kinds{Kind::kSignal});
  run.end(0, killed(SIGTERM));
  EXPECT_EQ(run.end(2, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
  EXPECT_FALSE(run.state().is_resizing()) << "it failed";
  run.stop_asked = false;
  EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
  EXPECT_EQ(run.state().settings.ranks, 4);
  EXPECT_EQ(run.state().history.restarts, 1);
}

/// The first second after a resize: no step has been made in this start, and the one before ended without a failure.
TEST(ElasticState, AKillRightAfterAResizeIsOneRestart) {
  for (const int wanted : {2, 4}) {
    Simulation run({.ranks = 3, .max_restarts = 2, .elastic = RankRange{2, 4}});
    train_and_ask(run);
    run.resize_to = wanted;
    run.look();
    leave(run);
    run.resize_to = 0;
    EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
    EXPECT_EQ(run.state().resizes, 1);
    EXPECT_EQ(run.state().restarts_after_failures(), 0);
    for (int time = 1; time <= 2; ++time) {
      new_team(run);
      run.look();
      EXPECT_EQ(run.end(1, killed(SIGKILL)), Kinds{Kind::kSignal});
      for (int rank = 0; rank < wanted; ++rank)
        if (rank != 1) run.end(rank, killed(SIGTERM));
      EXPECT_FALSE(run.state().is_resizing());
      EXPECT_EQ(run.look(), Kinds{Kind::kRestart}) << run.said;
      EXPECT_EQ(run.state().restarts_after_failures(), time);
    }
    EXPECT_EQ(run.state().resizes, 1);
  }
}

TEST(ElasticState, ASignalDuringAResizeEndsTheRun) {
  for (const bool late : {false, true}) {
    Simulation run({.ranks = 2, .elastic = RankRange{2, 4}});
    train_and_ask(run);
    run.resize_to = 4;
    run.look();
    if (!late) {
      EXPECT_EQ(run.signal(SIGTERM), Kinds{});
      EXPECT_EQ(run.state().phase, Phase::kLeaving);
    }
    EXPECT_EQ(leave(run), Kinds{Kind::kGatherEvidence});
    EXPECT_EQ(run.state().phase, late ? Phase::kPausing : Phase::kOver);
    if (late) run.feed(SignalReceived{SIGTERM});
    EXPECT_EQ(run.state().phase, Phase::kOver);
    EXPECT_EQ(run.code(), kExitPreempted);
  }
}

TEST(ElasticState, ASignalToOneRankLeavesOneOut) {
  Simulation run({.ranks = 3, .elastic = RankRange{2, 4}});
  train_and_ask(run);
  run.stop_asked = true;
  run.look();
  EXPECT_EQ(leave(run), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
  EXPECT_EQ(run.state().settings.ranks, 2);
  new_team(run);
  train_and_ask(run);
  run.stop_asked = true;
  run.look();
  EXPECT_EQ(leave(run), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kOver) << "no rank can be left out";
  EXPECT_EQ(run.code(), kExitPreempted);
}

TEST(ElasticState, FewerThanTheMinimumHaveAVerdictOfTheirOwn) {
  Simulation run({.ranks = 2, .max_restarts = 9, .elastic = RankRange{2, 4}});
  for (int time = 0; time < 2; ++time) {
    train(run);
    run.ranks[1].account.steps += time;
    run.end(1, exited(1));
    run.end(0, killed(SIGTERM));
    if (time == 0) {
      EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
      new_team(run);
    }
  }
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_EQ(run.state().exit_code, kExitTooFewRanks);
  EXPECT_TRUE(contains(run.said, "fewer than the 2 ranks that --elastic demands")) << run.said;
}

TEST(ElasticState, BeforeARestartTheGraceIsShort) {
  for (const int restarts : {0, 1}) {
    Simulation run({.ranks = 2, .max_restarts = restarts});
    train(run);
    EXPECT_EQ(run.end(1, killed(SIGKILL)), Kinds{Kind::kSignal});
    EXPECT_EQ(*run.state().deadline - run.now(), restarts == 0 ? milliseconds(5000) : milliseconds(100));
  }
}

TEST(ElasticState, TheSameErrorTwiceIsToldAsABug) {
  Simulation run({.ranks = 2, .max_restarts = 5});
  for (int time = 0; time < 2; ++time) {
    train(run);
    // Started from step 0, then from a checkpoint of step 2.
    run.ranks[0].account.first_step = 2 * time;
    for (auto& rank : run.ranks) rank.account.steps = 7 - 2 * time;
    run.ranks[1].account.failure = RankFailure::kOwn;
    run.ranks[1].account.failure_text = "index out of range";
    run.end(1, exited(1));
    run.end(0, killed(SIGTERM));
    if (time == 0) {
      EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
      new_team(run);
    }
  }
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_TRUE(contains(run.state().no_restart, "rank 1 failed twice in step 7 with the same error")) << run.said;
  EXPECT_EQ(run.code(), kExitRankFailed);
}

/// A world that does at random what worlds do: ranks train, fail, hang, ignore signals, save or not when they are asked
/// to leave; the user resizes and interrupts.
class RandomWorld {
 public:
  RandomWorld(uint64_t seed, const RunSettings& settings) : random_(seed), settings_(settings), run_(settings) {}

  void live() {
    start_team();
    for (int turn = 0; run_.state().phase != Phase::kOver; ++turn) {
      ASSERT_LT(turn, 20000) << "it does not end";
      ASSERT_TRUE(run_.state().wake_at().has_value()) << "nothing would wake the launcher";
      act(chance(0.1) ? happen() : std::vector<Kind>{});
      if (run_.state().phase == Phase::kOver) break;
      act(run_.after(milliseconds(draw(1, 400))));
    }
    const int code = run_.state().phase == Phase::kOver ? run_.code() : -1;
    EXPECT_EQ(gathered_, restarted_ + 1);
    if (seen != nullptr) {
      ++seen->codes[code];
      seen->restarts += run_.state().history.restarts;
      seen->resizes += restarted_ - run_.state().history.restarts;
      seen->left_out += contains(run_.said, "it is left out") ? 1 : 0;
      seen->too_few += run_.state().exit_code == kExitTooFewRanks ? 1 : 0;
    }
    EXPECT_LE(run_.state().history.restarts, settings_.max_restarts);
    EXPECT_TRUE(code == kExitOk || code >= kExitRankFailed) << code;
  }

  /// That worlds differ.
  struct Seen {
    std::map<int, int> codes;
    int restarts = 0, resizes = 0, left_out = 0, too_few = 0;
  };
  Seen* seen = nullptr;

 private:
  enum class Rank { kTrains, kHangs, kEnded };

  int draw(int first, int last) {
    return static_cast<int>(random_() % static_cast<uint64_t>(last - first + 1)) + first;
  }
  bool chance(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }

  void start_team() {
    const int ranks = run_.state().settings.ranks;
    const RankRange range = settings_.elastic.value_or(RankRange{settings_.ranks, settings_.ranks});
    ASSERT_TRUE(range.contains(ranks)) << ranks;
    new_team(run_);
    run_.stop_asked = false;
    run_.stop_at = 0;
    run_.resize_to = 0;
    world_.assign(static_cast<size_t>(ranks), Rank::kTrains);
    asks_ = chance(0.8);
  }

  std::vector<Kind> end(size_t rank, ProcessEnd how) {
    if (world_[rank] == Rank::kEnded) return {};
    world_[rank] = Rank::kEnded;
    return run_.end(static_cast<int>(rank), how);
  }

  /// A team has so long to train: every world ends.
  std::vector<Kind> happen() {
    const size_t rank = static_cast<size_t>(draw(0, static_cast<int>(world_.size()) - 1));
    const bool rest = ++happened_ > 100;
    switch (rest ? 9 : draw(0, 9)) {
      case 0:
        return chance(0.7) ? Kinds{} : end(rank, chance(0.5) ? killed(SIGKILL) : exited(draw(1, 3)));
      case 1:
        run_.resize_to = draw(0, 6);
        return run_.look();
      case 2:
        if (!chance(0.03)) return {};
        return run_.signal(chance(0.5) ? SIGTERM : SIGINT);
      case 3:
        if (chance(0.1)) hang(rank);
        return {};
      case 4:
        if (chance(0.1) && asks_) run_.stop_asked = true;
        return run_.look();
      default:
        return work(rest);
    }
  }

  void hang(size_t rank) {
    if (world_[rank] != Rank::kTrains) return;
    world_[rank] = Rank::kHangs;
    run_.ranks[rank].process_state = 'T';
  }

  std::vector<Kind> work(bool rest) {
    const auto hanging = std::find(world_.begin(), world_.end(), Rank::kHangs);
    if (hanging != world_.end() && !rest) {
      for (size_t rank = 0; rank < world_.size(); ++rank)
        if (world_[rank] == Rank::kTrains)
          wait_in(run_.ranks[rank], 12, uint64_t{1} << static_cast<unsigned>(hanging - world_.begin()));
      return {};
    }
    const bool told = run_.stop_asked && asks_;
    std::vector<Kind> kinds;
    const auto add = [&](const std::vector<Kind>& more) { kinds.insert(kinds.end(), more.begin(), more.end()); };
    if (told && run_.stop_at == 0) run_.stop_at = run_.ranks[0].account.stop_calls + 1;
    for (size_t rank = 0; rank < world_.size(); ++rank) {
      if (world_[rank] != Rank::kTrains && !(rest && world_[rank] == Rank::kHangs)) continue;
      auto& account = run_.ranks[rank].account;
      account.phase = RankStatus::Phase::kJoined;
      ++account.beats;
      ++account.steps;
      if (asks_) ++account.stop_calls;
      if (told && account.stop_calls >= run_.stop_at)
        add(end(rank, exited(chance(0.9) ? kExitPreempted : 0)));
      else if (rest)
        add(end(rank, exited(0)));
      if (!kinds.empty()) break;  // what the launcher does comes first
    }
    return kinds;
  }

  void act(const std::vector<Kind>& kinds) {
    for (const Kind kind : kinds) {
      if (kind == Kind::kGatherEvidence) ++gathered_;
      if (kind == Kind::kAskToLeave) run_.stop_asked = true;
      if (kind == Kind::kRestart) {
        ++restarted_;
        start_team();
      }
      if (kind != Kind::kSignal && kind != Kind::kKill) continue;
      for (size_t rank = 0; rank < world_.size(); ++rank)
        if (kind == Kind::kKill || (world_[rank] != Rank::kHangs && chance(0.8)))
          act(end(rank, killed(kind == Kind::kKill ? SIGKILL : SIGTERM)));
    }
  }

  std::mt19937_64 random_;
  const RunSettings settings_;
  Simulation run_;
  std::vector<Rank> world_;
  bool asks_ = true;
  int happened_ = 0, gathered_ = 0, restarted_ = 0;
};

TEST(ElasticState, AlwaysEndsWithinItsLimits) {
  const int worlds = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 100000 : 2000;
  RandomWorld::Seen seen;
  for (int seed = 0; seed < worlds; ++seed) {
    SCOPED_TRACE(seed);
    RunSettings settings{.ranks = 2 + seed % 3, .hang_timeout = seconds(20), .max_restarts = seed % 7};
    if (seed % 5 != 0) settings.elastic = RankRange{1 + seed % 2, 4};
    if (seed % 11 == 0) settings.restarts_per_hour = 3;
    RandomWorld world(static_cast<uint64_t>(seed), settings);
    world.seen = &seen;
    world.live();
    if (testing::Test::HasFatalFailure()) return;
  }
  for (const int code :
       std::vector<int>{kExitOk, kExitRankFailed, kExitRankKilled, kExitHang, kExitPreempted, 128 + SIGINT})
    EXPECT_GT(seen.codes[code], 0) << code;
  EXPECT_GT(seen.restarts, worlds / 10);
  EXPECT_GT(seen.resizes, worlds / 10);
  EXPECT_GT(seen.left_out, worlds / 100);
  EXPECT_GT(seen.too_few, worlds / 100);
}

}  // namespace
}  // namespace lockstep::simulation
