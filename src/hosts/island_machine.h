#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "hosts/agent_process.h"
#include "hosts/island_places.h"

namespace lockstep::hosts {

/// A machine of a run of --islands, as its launcher sees it.
struct IslandMachine {
  enum class Phase { kEmpty, kRuns, kPauses, kFinished, kGone };
  Phase phase = Phase::kEmpty;
  std::string name;
  std::unique_ptr<AgentProcess> process;  ///< null if it has joined
  bool has_joined = false;
  int starts = 0;
  int turn = 0;                        ///< changes when another agent gets the place
  std::optional<int> told_end;         ///< the exit code that an agent tells which has joined
  std::string problem;                 ///< why its program ends, as it has told; empty: it has told nothing
  std::deque<Clock::time_point> ends;  ///< within an hour
  int exit_code = 0;
  Clock::time_point start_at = Clock::now(), seen = Clock::now();

  IslandPlace::Standing standing(bool is_connected) const {
    using enum IslandPlace::Standing;
    switch (phase) {
      case Phase::kEmpty:
        return kEmpty;
      case Phase::kPauses:
        return kAway;
      case Phase::kFinished:
        return kFinished;
      case Phase::kGone:
        return kGone;
      case Phase::kRuns:
        break;
    }
    return is_connected ? kThere : kAway;
  }
  /// One that joins has the place from now on.
  void seat(const std::string& its_name) {
    process.reset();  // a command that has started a machine which is gone
    name = its_name;
    has_joined = true;
    phase = Phase::kRuns;
    seen = Clock::now();
    exit_code = 0;
    told_end.reset();
    ++turn;
  }
};

}  // namespace lockstep::hosts
