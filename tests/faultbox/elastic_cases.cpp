// Runs that are killed and resized at random, and must go on as if nothing had happened.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "faultbox/cases.h"
#include "faultbox/memory_saves.h"

namespace lockstep::faultbox {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kElasticSteps = 60;
constexpr int kMostElasticRanks = 4;
/// Each of them costs no more than the step in hand.
constexpr int kMostKills = 3;
constexpr int64_t kWritesOfASave = MemorySaves::kWrites;

/// Where the state is saved after each step.
enum class Tier { kDisk, kMemory };
constexpr int kDiskEvery = 10;  ///< with kMemory

std::string name_of(Tier tier) { return tier == Tier::kMemory ? "memory" : "disk"; }

RunPlan elastic_plan(int ranks, const std::vector<std::string>& options, Tier tier = Tier::kDisk,
                     std::shared_ptr<TemporaryFolder> folder = {}) {
  RunPlan plan{.ranks = ranks, .options = options, .folder = std::move(folder)};
  if (!plan.folder) plan.folder = std::make_shared<TemporaryFolder>();
  const auto path = [&](const char* name) { return (plan.folder->path() / name).string(); };
  plan.program = {LOCKSTEP_BIN_DIR "/elastic_rank",   "page=" + path("page"),     "world=" + path("world"),
                  "checkpoint=" + path("checkpoint"), "result=" + path("result"), "steps=" + text(kElasticSteps)};
  if (tier == Tier::kMemory) plan.program.insert(plan.program.end(), {"memory=1", "disk_every=" + text(kDiskEvery)});
  return plan;
}

/// The result of an undisturbed run, on one rank.
std::string elastic_reference() {
  static const std::string result = [] {
    Run run(elastic_plan(1, {}));
    const bool in_time = run.wait(kLongest);
    const std::string hash = run.result();
    if (!in_time || run.exit_code() != 0 || hash.empty())
      throw std::runtime_error("an undisturbed run failed with code " + text(run.exit_code()) + "\n" +
                               run.report().text);
    return hash;
  }();
  return result;
}

/// Disturbs a run, and notes what was done.
class Disturber {
 public:
  Disturber(Run& run, Draw& draw, Outcome& outcome, int most_ranks, Tier tier = Tier::kDisk)
      : run_(run), draw_(draw), outcome_(outcome), most_ranks_(most_ranks), tier_(tier) {}

  /// False: the run has ended before.
  bool await_step(int64_t step) {
    outcome_.drawn += "; step " + text(step) + ": ";
    return run_.wait_until([&] { return run_.page().ranks[0].step.load() >= step; }, milliseconds(30000));
  }

  /// One, two or all ranks, and perhaps one more during the restart. Takes the time until the next step is finished.
  void kill_some() {
    run_.wait_for(microseconds(draw_.number(0, 8000)));
    const pid_t first = run_.page().ranks[0].pid;
    const int count = draw_.one_of<int>({1, 1, 2, most_ranks_});
    int64_t fault_ns = tier_ == Tier::kMemory && draw_.number(0, 1) == 0 ? kill_in_save(count) : kill_now(count);
    if (kills_ < kMostKills && draw_.number(0, 3) == 0) {
      outcome_.drawn += ", then during the restart ";
      run_.wait_for(microseconds(draw_.number(1000, 60000)));
      if (const int64_t again = kill_now(1); again != 0) fault_ns = again;
    }
    if (fault_ns != 0 && await_next_step(first)) note_time_since(fault_ns);
  }

  /// One rank, anywhere in a step.
  void kill_one() {
    run_.wait_for(microseconds(draw_.number(0, 50000)));
    const pid_t first = run_.page().ranks[0].pid;
    if (const int64_t fault_ns = kill_now(1); fault_ns != 0)
      if (await_next_step(first)) note_time_since(fault_ns);
  }

  /// `first`: rank 0 before the new start.
  bool await_next_step(pid_t first) {
    int64_t before = -1;
    const bool goes_on = run_.wait_until(
        [&] {
          const auto& page = run_.page();
          if (page.ranks[0].pid == first) return false;
          if (before < 0) before = page.made;
          return page.made > before || page.ranks[0].place.load() >= Place::kExit;
        },
        milliseconds(30000));
    if (!goes_on && !run_.ended()) outcome_.problems.emplace_back("no step is made after a kill");
    return goes_on;
  }
  void note_time_since(int64_t fault_ns) { next_step_ms_.push_back(static_cast<double>(now_ns() - fault_ns) / 1e6); }

  /// SIGTERM to one rank of three or more, and SIGKILL when its time is over: the run goes on with one rank less. A run
  /// of one would rightly end when that is killed twice.
  void preempt() {
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < most_ranks_; ++rank)
      if (const pid_t pid = run_.find_rank(rank); pid != 0) ranks.push_back(pid);
    outcome_.drawn += "preempted";
    if (ranks.size() < 3) return;
    const pid_t first = run_.page().ranks[0].pid, chosen = draw_.one_of(ranks);
    const int64_t time_us = draw_.number(0, 30000);
    outcome_.drawn += " one of " + text(static_cast<int64_t>(ranks.size())) + " with " + text(time_us) + " us";
    ::kill(chosen, SIGTERM);
    run_.wait_for(microseconds(time_us));
    const auto alive = run_.processes();
    if (std::find(alive.begin(), alive.end(), chosen) != alive.end()) {
      ::kill(chosen, SIGKILL);
      ++kills_;
      outcome_.drawn += ", killed";
    }
    await_next_step(first);
  }

  /// `lockstep resize`.
  void resize() {
    const std::string ranks = text(draw_.number(2, most_ranks_));
    outcome_.drawn += "resized to " + ranks;
    const std::string folder = run_.path("run");
    const pid_t child = ::fork();
    if (child == 0) {
      const int null = ::open("/dev/null", O_RDWR);
      for (const int fd : {0, 1, 2}) ::dup2(null, fd);
      ::close_range(3, ~0U, 0);
      ::execl(LOCKSTEP_BIN_DIR "/lockstep", "lockstep", "resize", folder.c_str(), ranks.c_str(), "--timeout", "20",
              nullptr);
      ::_exit(126);
    }
    int status = 0;
    pid_t ended = 0;
    for (const int64_t start = now_ns(); ended == 0 && now_ns() - start < 25'000'000'000;) {
      ended = ::waitpid(child, &status, WNOHANG);
      if (ended == 0) run_.wait_until([] { return false; }, milliseconds(2));
    }
    if (ended == 0) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
    }
    if ((!WIFEXITED(status) || WEXITSTATUS(status) != 0) &&
        !run_.wait_until([&] { return run_.ended(); }, milliseconds(2000)))
      if (!run_.ended())
        outcome_.problems.push_back("`lockstep resize` ended with " +
                                    text(WIFEXITED(status) ? WEXITSTATUS(status) : -1));
  }

  /// Of a rank that dies by itself.
  void count_kill() { ++kills_; }
  int kills() const { return kills_; }
  const std::vector<double>& next_step_ms() const { return next_step_ms_; }

 private:
  /// Lets up to `count` ranks die before a write of their next save to memory. Returns when one did; 0 if none was
  /// there.
  int64_t kill_in_save(int count) {
    // The ranks of a start forget what was meant for those before; in their first step they have done so.
    if (!run_.wait_until([&, made = run_.page().made.load()] { return run_.page().made > made; }, milliseconds(30000)))
      return 0;
    std::vector<int> ranks;
    for (int rank = 0; rank < most_ranks_; ++rank)
      if (run_.find_rank(rank) != 0) ranks.push_back(rank);
    const int64_t before = run_.page().cut_saves;
    outcome_.drawn += "killed in a save to memory";
    for (; count > 0 && !ranks.empty(); --count) {
      const auto chosen = ranks.begin() + draw_.number(0, static_cast<int64_t>(ranks.size()) - 1);
      const int64_t write = draw_.number(1, kWritesOfASave);
      outcome_.drawn += " " + text(*chosen) + " (write " + text(write) + ")";
      run_.page().ranks[*chosen].die_at_write = write;
      ranks.erase(chosen);
    }
    if (!run_.wait_until([&] { return run_.page().cut_saves > before; }, milliseconds(30000))) {
      if (!run_.ended()) outcome_.problems.emplace_back("no save to memory comes");
      return 0;
    }
    ++kills_;
    outcome_.cut_saves += static_cast<int>(run_.page().cut_saves - before);
    return now_ns();
  }

  /// Kills up to `count` ranks. Returns when; 0 if none was there.
  int64_t kill_now(int count) {
    std::vector<std::pair<int, pid_t>> ranks;
    for (int rank = 0; rank < most_ranks_; ++rank)
      if (const pid_t pid = run_.find_rank(rank); pid != 0) ranks.emplace_back(rank, pid);
    const int64_t at = now_ns();
    outcome_.drawn += "killed";
    for (; count > 0 && !ranks.empty(); --count) {
      const auto chosen = ranks.begin() + draw_.number(0, static_cast<int64_t>(ranks.size()) - 1);
      const auto place = run_.page().ranks[chosen->first].place.load();
      outcome_.drawn += " " + text(chosen->first) + " (" + kPlaceNames[static_cast<size_t>(place)] + ")";
      ::kill(chosen->second, SIGKILL);
      ranks.erase(chosen);
      killed_any_ = true;
    }
    if (!killed_any_) return 0;
    killed_any_ = false;
    ++kills_;
    return at;
  }

  Run& run_;
  Draw& draw_;
  Outcome& outcome_;
  const int most_ranks_;
  const Tier tier_;
  int kills_ = 0;
  bool killed_any_ = false;
  std::vector<double> next_step_ms_;
};

void expect_no_step_lost(Outcome& outcome, const Run& run, int steps, int kills) {
  const int64_t made = run.page().made;
  outcome.drawn += "; " + text(made) + " steps made";
  if (made > steps + kills)
    outcome.problems.push_back(text(made) + " steps made for " + text(steps) + " with " + text(kills) + " kills");
  if (made < steps) outcome.problems.push_back("only " + text(made) + " steps made");
}

/// Many small disturbances of a program that starts at once.
Outcome disturb_often(Draw& draw) {
  const int ranks = static_cast<int>(draw.number(2, kMostElasticRanks));
  const Tier tier = draw.number(0, 3) == 0 ? Tier::kDisk : Tier::kMemory;
  Outcome outcome{.drawn = text(ranks) + " ranks that save to " + name_of(tier)};
  Run run(elastic_plan(ranks, {"--elastic", "1:" + text(kMostElasticRanks), "--max-restarts", "20"}, tier));
  Disturber disturber(run, draw, outcome, kMostElasticRanks, tier);
  std::vector<int64_t> at(static_cast<size_t>(draw.number(1, 4)));
  for (auto& step : at) step = draw.number(1, kElasticSteps - 6);
  std::sort(at.begin(), at.end());
  for (const int64_t step : at) {
    if (!disturber.await_step(step)) break;
    const int64_t what = draw.number(0, 5);
    if (disturber.kills() < kMostKills && what < 3)
      disturber.kill_some();
    else if (disturber.kills() < kMostKills && what == 3)
      disturber.preempt();
    else
      disturber.resize();
  }
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  outcome.output = run.report().text;
  outcome.next_step_ms = disturber.next_step_ms();
  if (run.exit_code() != 0)
    outcome.problems.push_back("exit code " + text(run.exit_code()) + " instead of 0");
  else if (run.result() != elastic_reference())
    outcome.problems.push_back("its result is " + run.result() + ", not " + elastic_reference());
  expect_no_step_lost(outcome, run, kElasticSteps, disturber.kills());
  add(outcome.problems, run.audit());
  return outcome;
}

/// A rank of a training is killed by the kernel some time after a save to memory has begun.
void await_kill_in_save(Run& run, Disturber& disturber, Outcome& outcome, int rank) {
  const auto& page = run.page();
  const auto& its = page.ranks[rank];
  const pid_t first = page.ranks[0].pid;
  if (!run.wait_until([&] { return its.fault_ns != 0 && now_ns() > its.fault_ns + 10'000'000; }, milliseconds(30000))) {
    outcome.problems.emplace_back("no rank has died");
    return;
  }
  disturber.count_kill();
  const auto place = its.place.load();  // a process with torch takes longer to start again
  outcome.drawn += std::string("killed ") + text(rank) + " (" + kPlaceNames[static_cast<size_t>(place)] + ")";
  outcome.cut_saves += place == Place::kMemorySave ? 1 : 0;
  if (disturber.await_next_step(first)) disturber.note_time_since(its.fault_ns);
}

/// A real training, which keeps its number of ranks.
Outcome disturb_training(Shared& shared, Draw& draw) {
  const int ranks = static_cast<int>(draw.number(2, 3)), rank = static_cast<int>(draw.number(0, ranks - 1));
  const Tier tier = draw.number(0, 3) == 0 ? Tier::kDisk : Tier::kMemory;
  const bool in_save = tier == Tier::kMemory && draw.number(0, 2) != 0;
  Outcome outcome{.drawn = "a training with torch, " + text(ranks) + " ranks that save to " + name_of(tier)};
  RunPlan plan{.ranks = ranks, .options = {"--max-restarts", "9"}, .words = {"steps=" + text(kSteps), "pause_ms=15"}};
  if (tier == Tier::kMemory)
    plan.words.insert(plan.words.end(), {"memory=1", "every=1000"});
  else
    plan.words.insert(plan.words.end(), {"every=1", "asynchronous=0"});
  const int64_t step = draw.number(1, kSteps - 4);
  if (in_save)
    plan.words.insert(plan.words.end(), {"fault=kill", "at=memory_save", "rank=" + text(rank), "step=" + text(step),
                                         "delay_us=" + text(draw.number(0, 3000))});
  Run run(std::move(plan));
  Disturber disturber(run, draw, outcome, ranks);
  if (disturber.await_step(step)) {
    if (in_save)
      await_kill_in_save(run, disturber, outcome, rank);
    else
      disturber.kill_some();
  }
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  outcome.next_step_ms = disturber.next_step_ms();
  expect_same_result(outcome, run, shared, ranks, kSteps);
  expect_no_step_lost(outcome, run, kSteps, disturber.kills());
  return outcome;
}

/// The step that a training would go on from that has nothing but the disk.
int64_t step_on_disk(const TemporaryFolder& folder) {
  const std::string saved = read_file((folder.path() / "checkpoint").string());
  return saved.empty() ? 0 : std::atoll(saved.c_str());
}

/// The launcher is killed, and with it goes its memory; the next one goes on from the disk.
Outcome kill_launcher(Draw& draw) {
  const int ranks = static_cast<int>(draw.number(2, kMostElasticRanks));
  const int64_t step = draw.number(1, kElasticSteps - 6);
  const Tier tier = draw.number(0, 1) == 0 ? Tier::kDisk : Tier::kMemory;
  Outcome outcome{.drawn = text(ranks) + " ranks that save to " + name_of(tier) + ", the launcher killed in step " +
                           text(step)};
  int64_t made = 0;
  auto folder = std::make_shared<TemporaryFolder>();
  {
    Run run(elastic_plan(ranks, {"--elastic", "1:4"}, tier, folder));
    run.wait_until([&] { return run.page().ranks[0].step.load() >= step; }, milliseconds(30000));
    ::kill(run.pid(), SIGKILL);
    if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
    add(outcome.problems, run.audit());
    made = run.page().made;
  }
  std::filesystem::remove(folder->path() / "world");  // its meetings are numbered by starts of one launcher
  const int64_t saved = step_on_disk(*folder);
  Run again(elastic_plan(static_cast<int>(draw.number(2, kMostElasticRanks)), {}, tier, folder));
  if (!again.wait(kLongest)) outcome.problems.emplace_back("the next start does not end");
  outcome.output = again.report().text;
  if (again.exit_code() != 0 || again.result() != elastic_reference())
    outcome.problems.push_back("the next start ended with " + text(again.exit_code()) + ", result " + again.result());
  const int64_t resumed = std::max<int64_t>(again.page().resumed_step - 1, 0);
  outcome.drawn += ", gone on at step " + text(resumed) + " after " + text(made);
  if (resumed != saved) outcome.problems.push_back("went on at step " + text(resumed) + ", not " + text(saved));
  if (made - saved > (tier == Tier::kMemory ? kDiskEvery : 1))
    outcome.problems.push_back("only " + text(saved) + " of " + text(made) + " steps were saved");
  if (again.page().made != kElasticSteps - saved)
    outcome.problems.push_back(text(again.page().made) + " steps made after step " + text(saved));
  add(outcome.problems, again.audit());
  return outcome;
}

}  // namespace

Outcome elastic_case(Shared& shared, Draw& draw, int instance) {
  if (instance % 10 == 3) return kill_launcher(draw);
  return instance % 5 == 4 ? disturb_training(shared, draw) : disturb_often(draw);
}

/// How long it takes to go on where a state of 67 MiB is read, compared and saved again.
Outcome mlp_case(Shared& shared, Draw& draw, int) {
  constexpr int kRanks = 2, kMlpSteps = 8;
  Outcome outcome{.drawn = "an MLP, " + text(kRanks) + " ranks that save to memory"};
  Run run({.ranks = kRanks,
           .options = {"--max-restarts", "1"},
           .words = {"net=mlp", "steps=" + text(kMlpSteps), "memory=1", "every=1000"}});
  Disturber disturber(run, draw, outcome, kRanks);
  if (disturber.await_step(draw.number(1, kMlpSteps - 3))) disturber.kill_one();
  if (!run.wait(kLongest)) outcome.problems.emplace_back("does not end");
  outcome.next_step_ms = disturber.next_step_ms();
  expect_same_result(outcome, run, shared, kRanks, kMlpSteps, "net=mlp");
  expect_no_step_lost(outcome, run, kMlpSteps, disturber.kills());
  return outcome;
}

}  // namespace lockstep::faultbox
