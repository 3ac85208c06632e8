#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/absence.h"
#include "launch/diagnosis/stall.h"
#include "launch/diagnosis/standstill.h"
#include "launch/diagnosis/verdict.h"

namespace lockstep {

/// What decides about a run, of its options.
struct RunSettings {
  int ranks = 1;
  std::chrono::milliseconds grace{5000};
  std::chrono::milliseconds hang_timeout{300000};
  int max_restarts = 0;
};

/// A run as its launcher sees it. It moves by next() alone.
///
///   kRunning --a rank failed, a hang, a signal--> kStopping --all ended------------------------> kOver or kPausing
///   kRunning --all ended-----------------------------------------------------------------------> kOver or kPausing
///   kRunning --SIGTERM, SIGUSR1, and the program asks for it--> kLeaving --all ended-----------> kOver
///   kStopping --grace over, or a signal--> kKilling --all ended, or kKillTime over-------------> kOver or kPausing
///   kPausing --back-off over--> kRunning (restarted)        kPausing --a signal----------------> kOver
///
/// kRunning also awaits, for a moment (settle_by), the end of a rank that others accuse. kLeaving is kRunning in all
/// but how it ends.
struct RunState {
  enum class Phase { kRunning, kLeaving, kStopping, kKilling, kPausing, kOver };

  RunSettings settings;
  Phase phase = Phase::kRunning;
  Clock::time_point started;                  ///< of the ranks that run now
  std::optional<Clock::time_point> deadline;  ///< of kStopping, kKilling and kPausing
  std::optional<Clock::time_point> settle_by;

  // Of the ranks that run now.
  std::vector<RankEnd> ends;  ///< as they were seen
  std::vector<int> killed;    ///< did not stop when they were asked to
  std::optional<Stall> hang;
  std::optional<Absence> absence;                   ///< that ends the run
  std::optional<Clock::time_point> absence_counts;  ///< there is one; from then on it ends the run
  bool may_be_absent = false;                       ///< there may come to be one
  std::optional<Phase> ended_as;                    ///< the phase in which the last rank ended

  // Of progress.
  Standstill standstill;
  Clock::duration next_note{0};  ///< of idleness
  bool told_slow = false;        ///< it has stood still for hang_timeout, and is no hang

  // Of the whole run.
  int restarts = 0;
  int stop_signal = 0;                        ///< the first signal to the launcher
  std::optional<Clock::time_point> asked_at;  ///< when the ranks were asked to leave at a step of their choice
  bool asked_twice = false;
  bool told = false;  ///< a rank was told to leave

  static RunState begin(const RunSettings& settings, Clock::time_point now);
  bool all_ended() const { return static_cast<int>(ends.size()) == settings.ranks; }
  /// When Looked is due even if nothing else happens.
  std::optional<Clock::time_point> wake_at() const;
  /// Whether the next Looked should say the states of processes, which cost system calls.
  bool wants_process_states() const;
  /// Whether it should say their processor times, which cost more.
  bool wants_processor_times() const;
};

struct RankEnded {
  RankEnd end;
};
struct SignalCame {
  int signal = 0;
};
/// The launcher has looked at all pages; comes after the other events of a turn.
struct Looked {
  std::vector<RankView> ranks;
  bool stop_asked = false;       ///< on the board: by this launcher, or by a signal to a rank
  uint64_t stop_at = 0;          ///< on the board: the call from which on the ranks are told to leave; 0: none yet
  bool processor_times = false;  ///< were looked for
};
using RunEvent = std::variant<RankEnded, SignalCame, Looked>;

struct RunAction {
  enum class Kind {
    kSay,         ///< text
    kSignal,      ///< signal, to all ranks that run, and SIGCONT for those that are stopped
    kAskToLeave,  ///< on the board: the ranks choose the step
    kKill,        ///< SIGKILL to all ranks that run
    kConclude,    ///< all ranks have ended, or will not: pass on the rest of their output, report
    kRestart,     ///< start all ranks again
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

/// What follows from an event. Pure: nothing but its arguments decides, the clock included.
Transition next(RunState state, const RunEvent& event, Clock::time_point now);

/// What the run has come to, or its ranks before a restart.
Verdict conclude(const RunState& state, const std::vector<RankView>& ranks);

}  // namespace lockstep
