#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/verdict.h"
#include "launch/plan.h"
#include "launch/process/process.h"

namespace lockstep {

/// Whether schedulers send this signal before they kill: SIGTERM and SIGUSR1.
bool asks_to_leave(int signal);

struct RestartLimits {
  int in_total = 0;
  int per_hour = kAnyNumber;
  std::optional<RankRange> elastic;
};

/// One failure of a run, with the facts that are compared with later ones.
struct Failure {
  Clock::time_point at;
  int ranks = 1;  ///< of the team that failed
  int rank = -1;  ///< the culprit; -1: none known
  int exit_code = 0;
  ProcessEnd how;
  std::string text;             ///< from the culprit's page
  std::optional<int64_t> step;  ///< the training step in which it failed; empty: not reported
  bool progress = false;        ///< a step was made since the start
  int lost_ranks = 0;           ///< of lost machines
};

/// The failure, by the verdict, of ranks that were started at `started`.
Failure failure_of(const Verdict& verdict, const Evidence& evidence, Clock::time_point started, Clock::time_point now);

/// Whether the ranks have made a step or saved a state. Ranks that report neither count as having made progress after
/// ten seconds.
bool has_progressed(const Evidence& evidence, Clock::time_point started, Clock::time_point now);

/// A run's failures and restarts. Keeps those of the last hour, so it does not grow.
struct RestartHistory {
  std::vector<Failure> failures;  ///< after which the run was started again, oldest first
  int restarts = 0;               ///< after failures
  int fruitless = 0;              ///< starts in a row, up to now, that made no step

  void add(const Failure& failure);
};

struct RestartDecision {
  bool restart = false;
  int ranks = 1;             ///< of the next team
  int left_out = -1;         ///< the rank without a place in it; -1: none, or those of lost machines
  Clock::duration pause{0};  ///< before it
  std::string why;           ///< why the number of ranks changes, or why there is no restart; may be empty
  int exit_code = 0;         ///< of the run without a restart: the failure's, or kExitTooFewRanks
  Failure failure;
};

/// Whether, when and with how many ranks a run is started again after `failure`. A pure function.
///
/// - There are no more restarts than the limits allow.
/// - An external cause (SIGKILL, also by the kernel for memory; SIGTERM and SIGUSR1 of a scheduler; a lost machine)
///   says nothing about the program: within the limits a restart always follows.
/// - If one rank fails by itself twice in a row in the same step with the same error, it has a bug that a restart does
///   not repair.
/// - A rank that fails by itself in a start without a step would do so again.
/// - With --elastic, a rank that fails twice within an hour at its place (its number, among the same number of ranks)
///   is left out. All ranks of a lost machine are left out at once. Either happens only if enough ranks remain.
/// - The first restarts are immediate. The pause grows with consecutive starts that make no step, and with consecutive
///   failures in the same step.
RestartDecision decide_restart(const RestartLimits& limits, const RestartHistory& history, const Failure& failure);

}  // namespace lockstep
