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

/// The options that decide about a run.
struct RunSettings {
  int ranks = 1;  ///< that run now, or ran last
  std::chrono::milliseconds grace{5000};
  std::chrono::milliseconds hang_timeout{300000};
  int max_restarts = 0;
  int restarts_per_hour = kAnyNumber;
  std::optional<RankRange> elastic;

  RestartLimits limits() const { return {max_restarts, restarts_per_hour, elastic}; }
};

/// A run as its launcher sees it. It moves by next() alone.
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
/// In kRunning it also waits for a moment (settle_by) for the end of a rank that others accuse. kLeaving differs from
/// kRunning only in how it ends. Where a restart will follow, nothing has to unwind, and the grace is short.
struct RunState {
  enum class Phase { kRunning, kLeaving, kStopping, kKilling, kGathering, kPausing, kOver };

  RunSettings settings;
  Phase phase = Phase::kRunning;
  Clock::time_point started;                  ///< of the ranks that run now
  std::optional<Clock::time_point> deadline;  ///< of kStopping, kKilling and kPausing
  std::optional<Clock::time_point> settle_by;

  // Of the ranks that run now.
  Evidence evidence;                                   ///< known so far; complete from the end of kGathering on
  std::vector<int> killed;                             ///< ranks that did not stop when asked to
  std::optional<Clock::time_point> missing_counts_at;  ///< a rank is missing, and ends the run from then on
  bool may_miss_a_rank = false;                        ///< a rank may come to be missing
  std::optional<Phase> ended_as;                       ///< the phase in which the last rank ended
  Verdict verdict;                                     ///< on complete evidence
  int exit_code = 0;                                   ///< of the run, if no start follows this one

  ProgressMonitor progress;
  Clock::duration next_note{0};  ///< how long it is idle when the next note is due
  bool told_slow = false;        ///< the user knows that it has been idle for hang_timeout, but does not hang

  std::optional<int> resize_to;  ///< they were asked to leave so that the run can go on with so many
  int next_ranks = 0;            ///< while kPausing: of the next start
  int left_out = -1;             ///< from kPausing on: the rank of the start before that has no place; -1: any
  std::string no_restart;        ///< why the failure that ended them is not followed by a restart; may be empty

  // Of the whole run.
  int restarts = 0;  ///< starts after the first
  int resizes = 0;   ///< of these, those that followed a resize rather than a failure
  RestartHistory history;
  bool program_asks = false;  ///< for stops, in this start or one before: ranks that were just started again will

  static RunState begin(const RunSettings& settings, Clock::time_point now);
  bool all_ended() const { return static_cast<int>(evidence.ends.size()) == settings.ranks; }
  /// The ranks have saved and left, and the next start has another number of them.
  bool is_resizing() const {
    return phase == Phase::kPausing && resize_to && ended_as == Phase::kLeaving && !verdict.culprit;
  }
  /// Starts of this run before the present one that followed a failure.
  int restarts_after_failures() const { return restarts - resizes; }
  /// When the next RanksObserved is due even if nothing else happens.
  std::optional<Clock::time_point> wake_at() const;
  /// Whether the next RanksObserved should have the states of processes, which cost system calls.
  bool wants_process_states() const;
  /// Whether it should have their processor times, which cost more.
  bool wants_processor_times() const;
};

struct RankEnded {
  RankEnd end;
};
struct SignalReceived {
  int signal = 0;
};
/// The launcher has read all pages. Comes after the other events of a turn.
struct RanksObserved {
  std::vector<RankView> ranks;
  bool stop_asked = false;       ///< on the board: by this launcher, or by a signal to a rank
  uint64_t stop_at = 0;          ///< on the board: the first call that tells the ranks to leave; 0: none yet
  bool processor_times = false;  ///< were sampled
  int resize_to = 0;             ///< on the board: a number of ranks that `lockstep resize` asks for; 0: none
  int lost_ranks = 0;            ///< of machines that are gone
};
/// The answer to kGatherEvidence: what is known of the ranks when nothing more is awaited from them.
struct EvidenceGathered {
  RanksObserved seen;
};
/// No rank runs: the start of the run, or the one that kRestart ordered, has failed.
struct StartFailed {
  int exit_code = 0;
  std::string text;
  bool from_outside = false;  ///< as LaunchError has it, like the next member
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

/// The transition that an event causes. A pure function of its arguments, the clock included.
Transition next(RunState state, const RunEvent& event, Clock::time_point now);

}  // namespace lockstep
