#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/evidence.h"
#include "launch/diagnosis/progress_monitor.h"
#include "launch/diagnosis/verdict.h"
#include "launch/restart_policy.h"

namespace lockstep {

/// The options that control a run.
struct RunSettings {
  int ranks = 1;  ///< current or last
  std::chrono::milliseconds grace{5000};
  std::chrono::milliseconds hang_timeout{300000};
  int max_restarts = 0;
  int restarts_per_hour = kAnyNumber;
  std::optional<RankRange> elastic;

  RestartLimits limits() const { return {max_restarts, restarts_per_hour, elastic}; }
};

/// A run as its launcher sees it. Only next() changes it.
///
///   kRunning --a rank failed, a hang, a signal--> kStopping --all ended---------------> kGathering
///   kRunning --all ended--------------------------------------------------------------> kGathering
///   kRunning --SIGTERM, SIGUSR1, if the program asks for stops--> kLeaving --all ended-> kGathering
///   kRunning --another number of ranks is wanted, likewise--> kLeaving --all ended----> kGathering
///   kStopping --grace over, or a signal--> kKilling --all ended, or kKillTime over----> kGathering
///   kGathering --all evidence is there: judge(), decide_restart()--> kPausing, if another start follows, or kOver
///   kPausing --back-off over--> kRunning (restarted)        kPausing --a signal-------> kOver
///   kRunning --the ranks could not be started--> kPausing, if another start follows, or kOver
///
/// In kRunning it also waits briefly (settle_by) for the end of an accused rank. kLeaving differs from kRunning only in
/// the way it ends. If a restart will follow, nothing has to unwind, and the grace is short.
struct RunState {
  enum class Phase { kRunning, kLeaving, kStopping, kKilling, kGathering, kPausing, kOver };

  RunSettings settings;
  Phase phase = Phase::kRunning;
  Clock::time_point started;                  ///< of the current ranks
  std::optional<Clock::time_point> deadline;  ///< of kStopping, kKilling and kPausing
  std::optional<Clock::time_point> settle_by;

  // State of the current ranks.
  Evidence evidence;                                   ///< known so far; complete from the end of kGathering on
  std::vector<int> killed;                             ///< ranks that did not stop when asked to
  std::optional<Clock::time_point> missing_counts_at;  ///< time when a missing rank will end the run
  bool may_miss_a_rank = false;
  std::optional<Phase> ended_as;  ///< the phase in which the last rank ended
  Verdict verdict;                ///< on complete evidence
  int exit_code = 0;              ///< of the run, if no start follows this one

  ProgressMonitor progress;
  Clock::duration next_note{0};  ///< the idle time at which the next note is due
  bool told_slow = false;        ///< the user was told that it has been idle for hang_timeout without hanging

  std::optional<int> resize_to;  ///< they were asked to leave so that the run continues with this number
  int next_ranks = 0;            ///< while kPausing: of the next start
  int left_out = -1;             ///< from kPausing on: the rank of the previous start without a place; -1: any
  std::string no_restart;        ///< why no restart follows the failure that ended them; may be empty

  // State of the whole run.
  int restarts = 0;  ///< starts after the first
  int resizes = 0;   ///< of these, those that followed a resize rather than a failure
  RestartHistory history;
  bool program_asks = false;  ///< for stops, in this start or an earlier one: restarted ranks will ask again

  static RunState begin(const RunSettings& settings, Clock::time_point now);
  bool all_ended() const { return static_cast<int>(evidence.ends.size()) == settings.ranks; }
  /// Whether the ranks have saved and left, and the next start has another number of them.
  bool is_resizing() const {
    return phase == Phase::kPausing && resize_to && ended_as == Phase::kLeaving && !verdict.culprit;
  }
  /// Earlier starts of this run that followed a failure.
  int restarts_after_failures() const { return restarts - resizes; }
  /// The time when the next RanksObserved is due even without other events.
  std::optional<Clock::time_point> wake_at() const;
  /// Whether the next RanksObserved should contain process states, which cost system calls.
  bool wants_process_states() const;
  /// Whether it should contain processor times, which cost more.
  bool wants_processor_times() const;
};

struct RankEnded {
  RankEnd end;
};
struct SignalReceived {
  int signal = 0;
};
/// The launcher has read all pages. Follows the other events of a turn.
struct RanksObserved {
  std::vector<RankView> ranks;
  bool stop_asked = false;       ///< on the board: by this launcher, or by a signal to a rank
  uint64_t stop_at = 0;          ///< on the board: the first call that tells the ranks to leave; 0: none yet
  bool processor_times = false;  ///< were sampled
  int resize_to = 0;             ///< on the board: a number of ranks that `lockstep resize` asks for; 0: none
  int lost_ranks = 0;            ///< of lost machines
};
/// The answer to kGatherEvidence: the facts about the ranks when nothing more is expected from them.
struct EvidenceGathered {
  RanksObserved seen;
};
/// The start of the run, or the one ordered by kRestart, has failed; no rank runs.
struct StartFailed {
  int exit_code = 0;
  std::string text;
  bool from_outside = false;  ///< as in LaunchError, like the next member
  int lost_ranks = 0;
};
using RunEvent = std::variant<RankEnded, SignalReceived, RanksObserved, EvidenceGathered, StartFailed>;

struct RunAction {
  enum class Kind {
    kTellUser,        ///< text
    kSignal,          ///< signal, to all ranks that run, and SIGCONT for those that are stopped
    kAskToLeave,      ///< on the board: the ranks choose the step
    kKill,            ///< SIGKILL to all ranks that run
    kGatherEvidence,  ///< all ranks have ended, or never will: read the rest of their output, answer EvidenceGathered
    kReport,          ///< the verdict, and whether another start follows, are in the state
    kRestart,         ///< start settings.ranks ranks again
  };
  Kind kind;
  int signal = 0;
  std::string text;
  bool operator==(const RunAction&) const = default;
};

struct Transition {
  RunState state;
  std::vector<RunAction> actions;
};

/// The transition that an event causes. A pure function of its arguments, including the clock.
Transition next(RunState state, const RunEvent& event, Clock::time_point now);

}  // namespace lockstep
