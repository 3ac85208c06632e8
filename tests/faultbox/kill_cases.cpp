// Processes that are killed or stopped from outside, or by the kernel at a given instant.

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

int draw_ranks(Draw& draw) {
  const int64_t side = draw.number(0, 9);
  return side < 4 ? 2 : side < 8 ? 3 : 8;
}

/// Whether all ranks train.
bool all_train(const Run& run, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (run.page().ranks[rank].place.load() < Place::kForward) return false;
  return true;
}

void expect_restart(Outcome& outcome, const Run& before, Shared& shared, int ranks,
                    const std::string& sharded = "none") {
  Run again({.ranks = ranks, .words = {"steps=" + text(kSteps), "sharded=" + sharded}, .folder = before.folder()});
  if (!again.wait(kLongest)) outcome.problems.emplace_back("the next start does not end");
  expect_same_result(outcome, again, shared, ranks, kSteps, "sharded=" + sharded);
  outcome.drawn += ", gone on at step " + text(again.page().resumed_step.load() - 1);
}

/// From outside, anywhere in the start: exec, dynamic linking, static initialisers, rendezvous.
int64_t kill_in_start(Run& run, int rank, int64_t delay_us) {
  pid_t pid = 0;
  run.wait_until([&] { return (pid = run.find_rank(rank)) != 0; }, milliseconds(5000));
  run.wait_for(microseconds(delay_us));
  const int64_t instant = now_ns();
  return pid != 0 && ::kill(pid, SIGKILL) == 0 ? instant : 0;
}

/// Tells when each of two processes was dead.
class Deaths {
 public:
  Deaths(pid_t first, pid_t second) {
    for (const pid_t pid : {first, second}) {
      const auto at = static_cast<size_t>(pid == second);
      fds_[at] = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    }
    watch_ = std::thread([this] { watch(); });
  }
  ~Deaths() { watch_.join(); }
  /// Waits for both.
  std::pair<int64_t, int64_t> times() {
    eventually([&] { return times_[0].load() != 0 && times_[1].load() != 0; }, milliseconds(10000));
    return {times_[0].load(), times_[1].load()};
  }

 private:
  void watch() {
    std::array<pollfd, 2> polled = {pollfd{fds_[0].get(), POLLIN, 0}, pollfd{fds_[1].get(), POLLIN, 0}};
    for (int left = 2; left > 0 && ::poll(polled.data(), 2, 10000) > 0;) {
      const int64_t now = now_ns();
      for (size_t i = 0; i < 2; ++i)
        if (polled[i].revents != 0) times_[i] = now, polled[i].fd = -1, --left;
    }
  }
  std::array<FileDescriptor, 2> fds_;
  std::array<std::atomic<int64_t>, 2> times_{};
  std::thread watch_;
};

/// A rank of a training that is killed in `place`.
Outcome kill_in(Place place, const std::string& sharded, Shared& shared, Draw& draw) {
  const int ranks = draw_ranks(draw);
  const auto rank = static_cast<int>(draw.number(0, ranks - 1));
  const int64_t step = draw.number(0, kSteps - 1), bucket = draw.number(0, 5);
  const std::string at = kPlaceNames[static_cast<size_t>(place)];
  const int64_t delay_us = draw.number(0, place == Place::kStart                                 ? 150000
                                          : place == Place::kRendezvous || place == Place::kExit ? 30000
                                                                                                 : 2000);
  // A sharded step must leave nothing half done in the checkpoint before it.
  const bool restarts = place == Place::kSave || (sharded != "none" && place == Place::kOptimizer);
  Outcome outcome{.drawn = text(ranks) + " ranks, rank " + text(rank) + " in " + at + " of step " + text(step) +
                           ", bucket " + text(bucket) + ", after " + text(delay_us) + " us"};
  Run run({.ranks = ranks,
           .words = {"steps=" + text(kSteps), "fault=" + std::string(place == Place::kStart ? "none" : "kill"),
                     "rank=" + text(rank), "at=" + at, "step=" + text(step), "bucket=" + text(bucket),
                     "delay_us=" + text(delay_us), "sharded=" + sharded}});
  int64_t fault_ns = 0;
  if (place == Place::kStart) fault_ns = kill_in_start(run, rank, delay_us);
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  if (place != Place::kStart) fault_ns = run.page().ranks[rank].fault_ns.load();
  if (fault_ns == 0) outcome.problems.emplace_back("the fault was not injected");
  // Only a process whose main is over may end before it is killed.
  if (place == Place::kExit && run.exit_code() == 0) {
    outcome.missed = true;
    expect_same_result(outcome, run, shared, ranks, kSteps, "sharded=" + sharded);
    return outcome;
  }
  expect(outcome, run, {.codes = {41}, .culprits = {rank}, .fault_ns = fault_ns});
  if (restarts && outcome.problems.empty()) expect_restart(outcome, run, shared, ranks, sharded);
  return outcome;
}

}  // namespace

Outcome kill_case(Shared& shared, Draw& draw, int instance) {
  const Place place =
      std::array{Place::kStart,     Place::kRendezvous, Place::kForward, Place::kBucket,
                 Place::kOptimizer, Place::kSave,       Place::kExit}[static_cast<size_t>(instance % 7)];
  return kill_in(place, "none", shared, draw);
}

/// Mostly within the step and the save after it.
Outcome sharded_case(Shared& shared, Draw& draw, int instance) {
  const Place place = std::array{Place::kOptimizer, Place::kSave,    Place::kOptimizer, Place::kBucket,
                                 Place::kOptimizer, Place::kForward, Place::kExit}[static_cast<size_t>(instance % 7)];
  const std::string sharded = draw.one_of<std::string>({"replicated", "shared"});
  Outcome outcome = kill_in(place, sharded, shared, draw);
  outcome.drawn = sharded + ", " + outcome.drawn;
  return outcome;
}

Outcome launcher_case(Shared& shared, Draw& draw, int) {
  const int ranks = static_cast<int>(draw.number(2, 3));
  const int64_t delay_us = draw.number(0, 700000);
  Outcome outcome{.drawn = text(ranks) + " ranks, " + text(delay_us) + " us after the start"};
  Run run({.ranks = ranks, .words = {"steps=" + text(kSteps), "pause_ms=50"}});
  run.wait_for(microseconds(delay_us));
  const int64_t fault_ns = now_ns();
  if (!run.ended()) ::kill(run.pid(), SIGKILL);
  run.wait(milliseconds(1000));
  if (run.exit_code() == 0) {
    outcome.missed = true;
  } else if (run.exit_code() != -SIGKILL) {
    outcome.problems.push_back("the launcher ended with " + text(run.exit_code()));
  }
  const auto late_ms = [&] {
    run.look_for_starvation();
    return static_cast<double>(now_ns() - fault_ns - run.lag_ns(fault_ns)) / 1e6 - 1000;
  };
  while (!run.processes().empty() && late_ms() < 0) std::this_thread::sleep_for(milliseconds(1));
  outcome.end_ms = static_cast<double>(now_ns() - fault_ns) / 1e6;
  if (!run.processes().empty() || late_ms() > 0) outcome.problems.push_back("processes are left after 1 s");
  add(outcome.problems, run.audit());
  if (outcome.problems.empty()) expect_restart(outcome, run, shared, ranks);
  return outcome;
}

Outcome two_case(Shared&, Draw& draw, int instance) {
  const int ranks = static_cast<int>(draw.number(3, 4));
  const auto first = static_cast<int>(draw.number(0, ranks - 1));
  const auto second = static_cast<int>((first + draw.number(1, ranks - 1)) % ranks);
  const bool in_shutdown = instance % 2 == 1;
  const int64_t gap_us = draw.one_of<int64_t>({0, 0, 100, 1000, 10000, 60000}), delay_us = draw.number(0, 20000);
  Outcome outcome{.drawn = text(ranks) + " ranks, rank " + text(first) + ", then rank " + text(second) +
                           (in_shutdown ? " when the launcher stops the others" : " after " + text(gap_us) + " us")};
  Run run({.ranks = ranks, .words = {"steps=100000", "pause_ms=1"}});
  if (!run.wait_until([&] { return all_train(run, ranks); }, milliseconds(20000))) {
    outcome.problems.emplace_back("does not start to train");
    return outcome;
  }
  run.wait_for(microseconds(delay_us));
  const pid_t first_pid = run.page().ranks[first].pid, second_pid = run.page().ranks[second].pid;
  Deaths deaths(first_pid, second_pid);
  const int64_t fault_ns = now_ns();
  ::kill(first_pid, SIGKILL);
  if (in_shutdown)
    run.wait_until([&] { return run.report().known_ns.has_value(); }, milliseconds(2000));
  else if (gap_us > 0)
    std::this_thread::sleep_for(microseconds(gap_us));
  ::kill(second_pid, SIGKILL);
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  const auto [first_dead, second_dead] = deaths.times();
  outcome.drawn += ", dead " + text((second_dead - first_dead) / 1000) + " us apart";
  // A process that died long before the other was killed first, whatever caused the delay.
  const bool clear = in_shutdown || second_dead - first_dead > 50'000'000;
  const Report report = run.report();
  const bool said =
      std::find(report.also_suspect.begin(), report.also_suspect.end(), first) != report.also_suspect.end();
  std::vector<int> culprits = {first};
  if (!clear || said) culprits.push_back(second);
  expect(outcome, run, {.codes = {41}, .culprits = culprits, .fault_ns = fault_ns});
  return outcome;
}

Outcome stop_case(Shared& shared, Draw& draw, int instance) {
  const int ranks = 3;
  const auto rank = static_cast<int>(draw.number(0, ranks - 1));
  const bool for_long = instance % 5 == 4;
  const int64_t step = draw.number(0, kSteps - 1);
  const int64_t time_ms = for_long ? 20000 : draw.number(100, shared.nightly ? 4000 : 2000);
  Outcome outcome{.drawn =
                      "rank " + text(rank) + " of 3 from step " + text(step) + " on, for " + text(time_ms) + " ms"};
  Run run({.ranks = ranks, .options = {"--hang-timeout", "5"}, .words = {"steps=" + text(kSteps), "pause_ms=10"}});
  auto& mine = run.page().ranks[rank];
  run.wait_until([&] { return mine.place.load() >= Place::kForward && mine.step.load() >= step; }, milliseconds(20000));
  const int64_t fault_ns = now_ns();
  if (run.ended() || ::kill(mine.pid, SIGSTOP) != 0) {
    outcome.missed = run.exit_code() == 0;
    if (!outcome.missed) outcome.problems.emplace_back("there was nothing to stop");
    return outcome;
  }
  // Only by the clock: a time-out is longer on a busy machine, and a short stop would become a long one.
  const auto is_time = [&] { return now_ns() >= fault_ns + time_ms * 1'000'000; };
  run.wait_until([&] { return run.ended() || is_time(); }, milliseconds(2 * time_ms));
  if (!run.ended()) ::kill(mine.pid, SIGCONT);
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  if (!for_long) {
    expect_same_result(outcome, run, shared, ranks, kSteps);
    return outcome;
  }
  expect(outcome, run,
         {.codes = {43}, .culprits = {rank}, .fault_ns = fault_ns, .known_within_s = 10, .end_within_s = 15});
  if (outcome.output.find("rank " + text(rank) + " is STOPPED") == std::string::npos)
    outcome.problems.push_back("does not say that rank " + text(rank) + " is STOPPED");
  return outcome;
}

}  // namespace lockstep::faultbox
