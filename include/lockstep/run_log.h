#pragma once

#include <lockstep/cxx20.h>

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
  /// The folder of the files, made if it does not exist. Empty: the launcher's run folder, or else runs/<name of the
  /// program>.
  std::string folder{};
  /// Rank 0 also writes TensorBoard event files, to the subfolder tensorboard.
  bool tensorboard = true;
  /// Steps taken before this program started. A resumed run continues the count.
  int64_t first_step = 0;
  /// Reductions of a watched model that each rank writes to FOLDER/trace_rank<r>.json, for Perfetto and the report. The
  /// first ten, which are not typical, are left out. 0: none.
  int traced_reductions = 50;
  /// The longest time that a line waits in memory if others follow it. A process that is killed loses the newer lines.
  std::chrono::milliseconds flush_interval = std::chrono::seconds(1);
};

/// Records what happens in a run: JSON lines on every rank (FOLDER/metrics_rank<r>.jsonl; docs/observing.md has the
/// format) and TensorBoard's event files on rank 0. `lockstep report FOLDER` makes a page from them.
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
/// Scalars whose names differ only in a part "train", "valid", "val", "test" or "eval" share a chart on the page.
///
/// Every rank constructs one and makes the same calls; only watch() communicates. Used by one thread. If the disk is
/// full, lines are lost, a message on stderr says so once, and training goes on.
class RunLog {
 public:
  using Scalars = std::initializer_list<std::pair<std::string_view, double>>;

  /// Throws Error if the folder cannot be written. Existing files are continued, so a resumed run may use the same
  /// folder.
  explicit RunLog(const Context& context, RunLogOptions options = {});
  RunLog(RunLog&&) noexcept;
  RunLog& operator=(RunLog&&) = delete;
  ~RunLog();

  /// From now on, records the cost of the reductions of `model`: buckets, share of communication, which rank is late.
  /// Turns on the model's set_rank_comparison() and, for the traced reductions, replaces its observer. `model`, a
  /// DistributedDataParallel, must not be moved while step() and epoch() are called. Every rank must call it.
  void watch(Replica& model);

  /// Begins epoch `number`, counted from 0. The time since the last step does not count as training.
  void epoch(int64_t number);
  /// Records an optimizer step in which this rank saw `samples` samples, with any values given. Rates are computed from
  /// the time between steps.
  void step(int64_t samples, Scalars scalars = {});
  /// Records a value at `step`, by default the last step.
  void scalar(std::string_view name, double value, std::optional<int64_t> step = std::nullopt);

  /// Steps taken, including the first_step of the options.
  int64_t steps() const;
  /// For histograms, pictures and text. Does nothing on ranks other than 0, or without TensorBoard.
  SummaryWriter& tensorboard();
  /// The folder of the files.
  const std::string& folder() const;
  /// Writes the lines that are waiting in memory.
  void flush();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
