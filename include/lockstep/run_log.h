#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

class Context;
class Replica;
class SummaryWriter;

struct RunLogOptions {
  /// Of the files; made if it is not there. Empty: the launcher's run folder, else runs/<name of the program>.
  std::string folder;
  /// Let rank 0 write TensorBoard's event files too, to the folder tensorboard within.
  bool tensorboard = true;
  /// Steps that were taken before this program began: a resumed run goes on from here.
  int64_t first_step = 0;
  /// How many reductions of a watched model each rank writes to FOLDER/trace_rank<r>.json, for Perfetto and the report,
  /// after the first ten, which are not like the others. 0: none.
  int traced_reductions = 50;
  /// A line waits at most this long in memory, if others follow it; what is younger is lost with a killed process.
  std::chrono::milliseconds flush_interval = std::chrono::seconds(1);
};

/// Writes down what happens in a run: JSON lines on every rank (FOLDER/metrics_rank<r>.jsonl; docs/observing.md has the
/// format) and TensorBoard's event files on rank 0. `lockstep report FOLDER` makes a page of it.
///
///     lockstep::RunLog log(context);
///     log.watch(model);
///     for (int epoch : train.epochs(4)) {
///       log.epoch(epoch);
///       for (auto& [data, target] : train) {
///         ...
///         log.step(data.size(0), {{"train/loss", loss.item<double>()}});
///       }
///       log.scalar("valid/accuracy", accuracy);
///     }
///
/// Scalars whose names differ only by a part train, valid, val, test or eval share a chart of the page.
///
/// Every rank constructs one and makes the same calls; but for watch() they do not communicate. Used by one thread.
/// A disk that is full costs lines and is said once on stderr; training goes on.
class RunLog {
 public:
  using Scalars = std::initializer_list<std::pair<std::string_view, double>>;

  /// Error if the folder cannot be written. A file that is there goes on, so a resumed run may use the same folder.
  explicit RunLog(const Context& context, RunLogOptions options = {});
  RunLog(RunLog&&) noexcept;
  RunLog& operator=(RunLog&&) = delete;
  ~RunLog();

  /// Notes from now on what the reductions of `model` cost: its buckets, the share of communication, which rank is
  /// late. Turns on its set_rank_comparison() and, for the traced reductions, takes the place of its observer. `model`,
  /// a DistributedDataParallel, must stay where it is as long as step() and epoch() are called. Every rank must call
  /// it.
  void watch(Replica& model);

  /// Epoch `number`, from 0, begins. The time since the last step does not count as training.
  void epoch(int64_t number);
  /// An optimizer step is done, in which this rank saw `samples` samples; the values, if any, are noted at it. Rates
  /// are taken from the time between steps.
  void step(int64_t samples, Scalars scalars = {});
  /// A value at `step`, by default the last one taken.
  void scalar(std::string_view name, double value, std::optional<int64_t> step = std::nullopt);

  /// Steps taken, the first_step of the options included.
  int64_t steps() const;
  /// For what is no scalar: histograms, pictures, text. Does nothing on ranks other than 0, or without TensorBoard.
  SummaryWriter& tensorboard();
  /// Of the files.
  const std::string& folder() const;
  /// Writes what waits in memory.
  void flush();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
