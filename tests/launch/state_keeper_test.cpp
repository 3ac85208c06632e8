#include "launch/state_keeper.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "launch/launch_error.h"

// Which states the launcher takes for sound when a run gives up.

namespace lockstep {
namespace {

/// The machines of a run whose memory holds a state of `step`.
struct Machines : RankPlaces {
  std::unique_ptr<Team> start(const TeamSetup&, int) override { return nullptr; }
  void leave_out(int) override {}
  std::string launch_command() const override { return ""; }
  KeptState keep_state(const std::string& other_folder, bool is_sound) override {
    const std::string folder = is_sound ? "/checkpoints" : other_folder;
    return {.step = step, .path = folder + "/step", .path_step = step, .written = true};
  }
  void end(int) override {}

  int64_t step = 0;
};

struct Start {
  int64_t first, saved;  ///< the step that it went on from, and that of its last state in memory; -1: it saved none
  int exit_code;
};

struct Told {
  std::string path;
  bool suspect;  ///< before the run gave up
};

Told told(const std::vector<Start>& starts) {
  Machines machines;
  StateKeeper keeper(-1, &machines, "/run");
  for (const Start& start : starts) {
    std::vector<RankView> ranks(2);
    for (RankView& rank : ranks) rank.account.memory_step = start.saved;
    ranks[0].account.first_step = start.first;
    machines.step = std::max(machines.step, start.saved);
    keeper.note(ranks, start.exit_code);
  }
  const bool suspect = keeper.left().suspect;
  keeper.keep(starts.back().exit_code);
  return {keeper.left().path, suspect};
}

constexpr const char* kWhereItBelongs = "/checkpoints/step";
constexpr const char* kAside = "/run/kept_state/step";

TEST(StateKeeper, PutsAsideWhatARunThatDivergedHasSaved) {
  EXPECT_EQ(told({{0, 40, kExitRankFailed}}).path, kWhereItBelongs);
  EXPECT_EQ(told({{0, 40, kExitDiverged}}).path, kAside);
  EXPECT_TRUE(told({{0, 40, kExitDiverged}}).suspect);
}

TEST(StateKeeper, PutsItAsideAlsoIfALaterStartFailsOtherwise) {
  EXPECT_EQ(told({{0, 40, kExitDiverged}, {40, 90, kExitRankFailed}}).path, kAside);
  EXPECT_EQ(told({{0, 40, kExitDiverged}, {40, 90, kExitRankFailed}, {90, 120, kExitHang}}).path, kAside);
  EXPECT_EQ(told({{0, 40, kExitDiverged}, {0, -1, kExitNotStarted}}).path, kAside) << "it has replaced nothing";
}

TEST(StateKeeper, TrustsStatesOfAStartThatWentOnFromBefore) {
  EXPECT_EQ(told({{0, 40, kExitRankFailed}, {40, 60, kExitDiverged}, {40, 70, kExitRankFailed}}).path, kWhereItBelongs);
  EXPECT_FALSE(told({{0, 40, kExitRankFailed}, {40, -1, kExitDiverged}}).suspect) << "it has saved nothing";
}

}  // namespace
}  // namespace lockstep
