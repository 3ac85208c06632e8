#include <lockstep/run_log.h>

#include <algorithm>
#include <filesystem>

#include <lockstep/context.h>
#include <lockstep/observer.h>
#include <lockstep/replica.h>
#include <lockstep/summary_writer.h>
#include <torch/version.h>

#include "base/error.h"
#include "observe/metrics_file.h"
#include "run_log/first_reductions.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// A line of rates covers at least this time.
constexpr double kRateSeconds = 0.5;
/// A line about reductions is written when their number has doubled, and at least this often.
constexpr double kReductionSeconds = 2;
constexpr int64_t kFirstReductions = 4;
/// The first reductions allocate memory and fault it in.
constexpr int kUntracedReductions = 10;

std::string folder_of(const Context& context, const RunLogOptions& options, const SystemFacts& system) {
  if (!options.folder.empty()) return options.folder;
  if (!context.run_dir().empty()) return context.run_dir();
  const std::string program = system.command.empty() ? "" : fs::path(system.command.front()).filename().string();
  return "runs/" + (program.empty() ? "run" : program);
}

std::string made(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw StorageError("cannot make the run folder " + folder + ": " + error.message() + "; choose another one");
  return folder;
}

std::string file_of(const std::string& folder, const std::string& name, int rank, const char* ending) {
  return (fs::path(folder) / (name + "_rank" + std::to_string(rank) + ending)).string();
}

RunLogOptions checked(const RunLogOptions& options) {
  TORCH_CHECK(options.first_step >= 0, "RunLog: first_step is ", options.first_step, "; steps count from 0");
  return options;
}

/// If virtual ranks cannot be divided evenly, the first ranks have more of them.
double share_of(const Context& context) {
  if (context.virtual_ranks() == 0) return 1.0 / context.world_size();
  const auto block = context.virtual_block();
  return static_cast<double>(block.last - block.first) / context.virtual_ranks();
}

}  // namespace

struct RunLog::State {
  State(const Context& context, const RunLogOptions& given, const SystemFacts& system)
      : options(checked(given)),
        folder(made(folder_of(context, given, system))),
        rank(context.rank()),
        world_size(context.world_size()),
        share(share_of(context)),
        file(file_of(folder, "metrics", context.rank(), ".jsonl"), given.flush_interval),
        place{.step = given.first_step, .epoch = 0} {
    if (options.tensorboard && context.is_main()) {
      writer = SummaryWriter((fs::path(folder) / "tensorboard").string(), {.flush_interval = given.flush_interval});
      writer.purge_from(options.first_step + 1);
    }
    file.run({.rank = rank,
              .world_size = world_size,
              .local_rank = context.local_rank(),
              .threads = context.threads(),
              .backend = context.group().backend(),
              .libtorch_version = TORCH_VERSION,
              .first_step = options.first_step},
             system);
  }

  void scalar(std::string_view name, double value, int64_t step) {
    file.scalar({.step = step, .epoch = place.epoch}, name, value);
    writer.add_scalar(name, value, step);
  }

  void count_step(int64_t samples) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - mark).count();
    mark = now;
    ++place.step;
    ++taken.steps;
    taken.samples += samples;
    taken.seconds += seconds;
    taken.longest_s = std::max(taken.longest_s, seconds);
    if (model != nullptr) {
      const double total = model->communication_seconds();
      taken.communication_s += total - communication_s;
      communication_s = total;
    }
    if (taken.seconds >= kRateSeconds) write_rates();
    if (model != nullptr) note_reductions(now);
  }

  void write_rates() {
    if (taken.steps == 0) return;
    file.steps(place, taken);
    if (taken.seconds > 0) {
      writer.add_scalar("rates/samples_per_second", static_cast<double>(taken.samples) / share / taken.seconds,
                        place.step);
      if (model != nullptr)
        writer.add_scalar("rates/communication_share", taken.communication_s / taken.seconds, place.step);
    }
    taken = {};
  }

  void note_reductions(Clock::time_point now) {
    const int64_t steps = place.step - options.first_step;
    if (steps < next_reductions && now - reductions_noted < std::chrono::duration<double>(kReductionSeconds)) return;
    while (next_reductions <= steps) next_reductions *= 2;
    reductions_noted = now;
    const ReductionStats stats = model->stats();
    if (stats.reductions > 0) file.reductions(place, stats);
    if (trace && trace->is_done()) {
      model->set_observer(nullptr);
      trace.reset();
    }
  }

  const RunLogOptions options;
  const std::string folder;
  const int rank, world_size;
  const double share;  ///< of all samples, on this rank
  MetricsFile file;
  SummaryWriter writer;
  TrainingPlace place;
  Replica* model = nullptr;
  std::shared_ptr<FirstReductions> trace;
  StepsTaken taken;            ///< not yet written
  double communication_s = 0;  ///< of the model, at the last step
  Clock::time_point mark = Clock::now();
  Clock::time_point reductions_noted = mark;
  int64_t next_reductions = kFirstReductions;
};

RunLog::RunLog(const Context& context, RunLogOptions options)
    : state_(std::make_unique<State>(context, options, system_facts())) {}
RunLog::RunLog(RunLog&&) noexcept = default;
RunLog::~RunLog() {
  if (state_) state_->write_rates();
}

void RunLog::watch(Replica& model) {
  State& state = *state_;
  state.model = &model;
  state.communication_s = model.communication_seconds();
  model.set_rank_comparison(true);
  if (state.options.traced_reductions <= 0 || state.world_size == 1) return;
  state.trace =
      std::make_shared<FirstReductions>(chrome_trace(file_of(state.folder, "trace", state.rank, ".json"), state.rank),
                                        kUntracedReductions, state.options.traced_reductions);
  model.set_observer(state.trace);
}

void RunLog::epoch(int64_t number) {
  TORCH_CHECK(number >= 0, "RunLog::epoch: ", number, "; epochs count from 0");
  state_->write_rates();
  state_->place.epoch = number;
  state_->mark = Clock::now();
}

void RunLog::step(int64_t samples, Scalars scalars) {
  TORCH_CHECK(samples >= 0, "RunLog::step: ", samples, " samples; expected none below 0");
  state_->count_step(samples);
  for (const auto& [name, value] : scalars) state_->scalar(name, value, state_->place.step);
}

void RunLog::scalar(std::string_view name, double value, std::optional<int64_t> step) {
  TORCH_CHECK(step.value_or(0) >= 0, "RunLog::scalar: `", name, "` at step ", step.value_or(0), "; steps count from 0");
  state_->scalar(name, value, step.value_or(state_->place.step));
}

int64_t RunLog::steps() const { return state_->place.step; }
SummaryWriter& RunLog::tensorboard() { return state_->writer; }
const std::string& RunLog::folder() const { return state_->folder; }

void RunLog::flush() {
  state_->file.flush();
  state_->writer.flush();
}

}  // namespace lockstep
