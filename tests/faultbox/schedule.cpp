#include "faultbox/schedule.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

constexpr int kScheduleRanks = 2;
constexpr std::chrono::seconds kPatience = 2 * kLongest;

struct Kill {
  int64_t step;
  int rank;
};

struct Loss {
  int64_t steps_made = 0;
  double seconds = 0;                ///< from each kill until the training was one step further than it had been
  std::vector<double> to_next_step;  ///< seconds from each kill until the next step was finished, be it an old one
  std::string result;
  bool ended_well = false;
};

/// Kills the rank, which waits for it, and waits until all that was lost has been made again. False: that did not come
/// to pass.
bool kill_and_wait(Run& run, const Kill& kill, Loss& loss) {
  FaultPage& page = run.page();
  const auto &its = page.ranks[kill.rank], &first = page.ranks[0];
  // A step that is made again does not count: the schedule goes by the training, not by the clock.
  if (!run.wait_until([&] { return its.place.load() == Place::kForward && its.step.load() >= kill.step; }, kPatience))
    return false;
  const int64_t reached = its.step, at_ns = now_ns();
  const pid_t before = first.pid;
  const auto seconds = [&] { return static_cast<double>(now_ns() - at_ns) / 1e9; };
  ::kill(its.pid, SIGKILL);
  ++page.kills;
  if (!run.wait_until([&] { return first.pid != before; }, kPatience)) return false;
  // The rank 0 before may still have finished the step in hand.
  if (!run.wait_until([&] { return page.made > page.made_before; }, kPatience)) return false;
  loss.to_next_step.push_back(seconds());
  const auto further = [&] { return first.step.load() > reached || first.place.load() == Place::kEnd; };
  if (!run.wait_until(further, kPatience)) return false;
  loss.seconds += seconds();
  return true;
}

Loss run_schedule(const std::string& python, const Schedule& schedule, const std::vector<Kill>& kills) {
  RunPlan plan{
      .ranks = kScheduleRanks, .options = {"--max-restarts", "9"}, .folder = std::make_shared<TemporaryFolder>()};
  const auto path = [&](const char* name) { return (plan.folder->path() / name).string(); };
  std::string steps;
  for (const Kill& kill : kills) steps += (steps.empty() ? "" : ",") + text(kill.step);
  plan.words = {"steps=" + text(schedule.steps), "pause_ms=20", "kill_steps=" + steps};
  if (python.empty()) {
    plan.words.insert(plan.words.end(), {"every=1", "asynchronous=0"});
  } else {
    // torchrun's agent keeps one store for all starts, under the same keys, and ranks that were started again wait for
    // each other without end when one of them reads the other's address of the start before (PyTorch's issue 135712).
    plan.launcher = {"/usr/bin/env",
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
                     python,
                     "-m",
                     "torch.distributed.run",
                     "--standalone",
                     "--nproc-per-node",
                     text(kScheduleRanks),
                     "--max-restarts",
                     "9"};
    plan.program = {LOCKSTEP_SOURCE_DIR "/tests/faultbox/ddp_rank.py", "page=" + path("page"),
                    "result=" + path("result"), "checkpoint=" + path("checkpoint"), "epoch=" + text(schedule.epoch)};
    plan.program.insert(plan.program.end(), plan.words.begin(), plan.words.end());
  }
  Run run(std::move(plan));
  Loss loss;
  const bool survived =
      std::all_of(kills.begin(), kills.end(), [&](const Kill& kill) { return kill_and_wait(run, kill, loss); });
  loss.ended_well = run.wait(survived ? kPatience : std::chrono::seconds(0)) && run.exit_code() == 0;
  loss.steps_made = run.page().made;
  loss.result = run.result();
  for (const pid_t left : run.processes()) ::kill(left, SIGKILL);
  eventually([&] { return run.processes().empty(); }, std::chrono::seconds(2));
  reap_orphans({});
  return loss;
}

std::string range_of(std::vector<double> values, int digits) {
  if (values.empty()) return "-";
  std::sort(values.begin(), values.end());
  std::array<char, 64> cell{};
  std::snprintf(cell.data(), cell.size(), "%.*f / %.*f", digits, values[values.size() / 2], digits, values.back());
  return cell.data();
}

/// At different steps, in their order.
std::vector<Kill> drawn(Draw& draw, const Schedule& schedule) {
  std::map<int64_t, int> rank_at;
  while (static_cast<int>(rank_at.size()) < schedule.kills) {
    const int64_t step = draw.number(5, schedule.steps - 5);
    rank_at[step] = static_cast<int>(draw.number(0, kScheduleRanks - 1));
  }
  std::vector<Kill> kills;
  for (const auto& [step, rank] : rank_at) kills.push_back({step, rank});
  return kills;
}

/// Of all schedules under one launcher.
struct Losses {
  int well = 0, same = 0;
  std::vector<double> steps, to_next_step, seconds;

  void add(const Loss& loss, const Loss& undisturbed) {
    if (!loss.ended_well) return;
    ++well;
    same += loss.result == undisturbed.result ? 1 : 0;
    steps.push_back(static_cast<double>(loss.steps_made - undisturbed.steps_made));
    to_next_step.insert(to_next_step.end(), loss.to_next_step.begin(), loss.to_next_step.end());
    seconds.push_back(loss.seconds);
  }
};

}  // namespace

int compare_schedules(const std::string& python, uint64_t seed, int count, const Schedule& schedule) {
  std::printf("%d kills in %d steps of %d ranks, %d schedules; epochs of %d steps\n", schedule.kills, schedule.steps,
              kScheduleRanks, count, schedule.epoch);
  std::printf(
      "| launcher | a checkpoint each | ended well | steps lost, median / most | seconds from a kill to the next "
      "finished step, median / most | seconds lost, median / most | same bits |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  int wrong = 0;
  for (const std::string& launcher : {std::string(), python}) {
    const Loss undisturbed = run_schedule(launcher, schedule, {});
    if (!undisturbed.ended_well || undisturbed.result.empty()) throw std::runtime_error("an undisturbed run failed");
    Losses sum;
    for (int instance = 0; instance < count; ++instance) {
      Draw draw(seed, "schedule", instance);
      sum.add(run_schedule(launcher, schedule, drawn(draw, schedule)), undisturbed);
    }
    std::printf("| %s | %s | %d of %d | %s | %s | %s | %d of %d |\n", launcher.empty() ? "lockstep run" : "torchrun",
                launcher.empty() ? "step" : "epoch", sum.well, count, range_of(sum.steps, 0).c_str(),
                range_of(sum.to_next_step, 2).c_str(), range_of(sum.seconds, 2).c_str(), sum.same, sum.well);
    std::fflush(stdout);
    if (!launcher.empty()) continue;
    const bool few =
        std::all_of(sum.steps.begin(), sum.steps.end(), [&](double lost) { return lost <= schedule.kills; });
    wrong += sum.well == count && sum.same == count && few ? 0 : 1;
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace lockstep::faultbox
