// Runs that are asked to leave, and runs that are started again.

#include <signal.h>

#include <cstring>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

bool has_come(const Run& run, int rank, int64_t step) {
  const auto& its = run.page().ranks[rank];
  return its.place.load() >= Place::kForward && its.step.load() >= step;
}

/// The last step that the rank made; all of them if it reached the end before the step after which all were to
/// leave.
int64_t last_step(const Run& run, int rank) {
  const auto& its = run.page().ranks[rank];
  return its.place.load() >= Place::kExit ? kSteps - 1 : its.step.load();
}

/// All ranks left after the same step, and the next start goes on from it.
void expect_saved(Outcome& outcome, Run& run, Shared& shared, int ranks) {
  if (run.exit_code() != 60) outcome.problems.push_back("exit code " + text(run.exit_code()) + " instead of 60");
  add(outcome.problems, run.audit());
  const int64_t left_at = last_step(run, 0);
  for (int rank = 1; rank < ranks; ++rank)
    if (last_step(run, rank) != left_at)
      outcome.problems.push_back("rank " + text(rank) + " left after step " + text(last_step(run, rank)) +
                                 ", rank 0 after step " + text(left_at));
  if (!outcome.problems.empty()) return;
  Run again({.ranks = ranks, .words = {"steps=" + text(kSteps)}, .folder = run.folder()});
  if (!again.wait(kLongest)) outcome.problems.emplace_back("the next start does not end");
  if (const int64_t resumed = again.page().resumed_step.load() - 1; resumed != left_at + 1)
    outcome.problems.push_back("left after step " + text(left_at) + ", went on with step " + text(resumed));
  expect_same_result(outcome, again, shared, ranks, kSteps);
}

}  // namespace

Outcome preempt_case(Shared& shared, Draw& draw, int instance) {
  const int ranks = static_cast<int>(draw.number(2, 3));
  const auto rank = static_cast<int>(draw.number(-1, ranks - 1));  // -1: the launcher
  const int signal = draw.number(0, 1) == 0 ? SIGTERM : SIGUSR1;
  const bool asks = instance % 5 != 4;  // else the program never asks
  const int64_t step = draw.number(0, kSteps - 3), delay_us = draw.number(0, 20000);
  Outcome outcome{.drawn = std::string("SIG") + ::sigabbrev_np(signal) + " to " +
                           (rank < 0 || !asks ? "the launcher" : "rank " + text(rank) + " of") + " " + text(ranks) +
                           " ranks in step " + text(step) + (asks ? "" : ", whose program does not ask")};
  Run run({.ranks = ranks,
           .words = {"steps=" + text(kSteps), "pause_ms=30", std::string("preempt=") + (asks ? "1" : "0")}});
  // A rank handles the signal once it asks for stops: before, the signal does what it does to any program.
  if (!run.wait_until([&] { return has_come(run, std::max(rank, 0), step + 1); }, milliseconds(20000)))
    outcome.problems.emplace_back("does not start to train");
  run.wait_for(microseconds(delay_us));
  const int64_t fault_ns = now_ns();
  ::kill(rank < 0 || !asks ? run.pid() : run.page().ranks[rank].pid.load(), signal);
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  outcome.end_ms = static_cast<double>(run.ended_ns() - fault_ns) / 1e6;
  outcome.output = run.report().text;
  if (asks && run.exit_code() == 0) {
    outcome.missed = true;
    expect_same_result(outcome, run, shared, ranks, kSteps);
  } else if (asks) {
    expect_saved(outcome, run, shared, ranks);
  } else {
    if (run.exit_code() != 61) outcome.problems.push_back("exit code " + text(run.exit_code()) + " instead of 61");
    add(outcome.problems, run.audit());
  }
  return outcome;
}

Outcome restart_case(Shared& shared, Draw& draw, int instance) {
  const int ranks = static_cast<int>(draw.number(2, 3));
  const auto rank = static_cast<int>(draw.number(0, ranks - 1)), other = static_cast<int>(draw.number(0, ranks - 1));
  const bool loops = instance % 4 == 3, killed_again = instance % 4 == 2;
  const Place place = loops ? Place::kRendezvous : draw.one_of<Place>({Place::kForward, Place::kBucket, Place::kSave});
  const std::string at = kPlaceNames[static_cast<size_t>(place)];
  const int64_t step = draw.number(2, kSteps - 2), delay_us = draw.number(0, 200000);
  Outcome outcome{.drawn =
                      "rank " + text(rank) + " of " + text(ranks) + " killed in " + at + " of step " + text(step) +
                      (loops          ? ", in every start"
                       : killed_again ? ", and rank " + text(other) + " " + text(delay_us) + " us after the restart"
                                      : "")};
  Run run({.ranks = ranks,
           .options = {"--max-restarts", "1"},
           .words = {"steps=" + text(kSteps), "fault=kill", "rank=" + text(rank), "at=" + at, "step=" + text(step),
                     "pause_ms=10", std::string("always=") + (loops ? "1" : "0")}});
  if (killed_again) {
    run.wait_until([&] { return run.page().ranks[rank].fault_ns.load() != 0; }, milliseconds(20000));
    const pid_t before = run.page().ranks[other].pid;
    pid_t now = 0;
    run.wait_until([&] { return (now = run.page().ranks[other].pid) != before; }, milliseconds(20000));
    run.wait_for(microseconds(delay_us));
    const int64_t fault_ns = now_ns();
    ::kill(now, SIGKILL);
    if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
    outcome.missed = run.exit_code() == 0;
    if (outcome.missed)
      expect_same_result(outcome, run, shared, ranks, kSteps);
    else
      expect(outcome, run, {.codes = {41}, .culprits = {other}});
    outcome.end_ms = static_cast<double>(run.ended_ns() - fault_ns) / 1e6;
    return outcome;
  }
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  const auto says = [&](const std::string& words) {
    if (outcome.output.find(words) == std::string::npos) outcome.problems.push_back("does not say \"" + words + "\"");
  };
  if (loops) {
    expect(outcome, run, {.codes = {41}, .culprits = {rank}, .fault_ns = run.page().ranks[rank].fault_ns.load()});
    says("restart 1 of 1");  // a signal from outside is worth its tries, though no step was made
    says("all 1 restarts that --max-restarts allows were made");
  } else {
    expect_same_result(outcome, run, shared, ranks, kSteps);
    says("restart 1 of 1");
  }
  return outcome;
}

}  // namespace lockstep::faultbox
