#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Names and numbers, in the order of the metrics.
using MetricValues = std::vector<std::pair<std::string, double>>;

/// Counts on this rank; reducing its Metrics sums the counts over all ranks. The result is exact however unevenly
/// samples are distributed. Each number is a double; counts are exact up to 2^53.
///
/// With virtual ranks, counts are kept separately for each virtual rank whose batch a loader has reached, and their sum
/// has the same bits on any number of ranks.
///
/// A metric describes this rank's samples before reduction, and all ranks' samples afterwards. The next update then
/// starts a new count, so the same objects can be used in every epoch.
///
/// With tensors on a GPU, an update launches its kernels and does not wait; reading or reducing waits. Updates are not
/// collectives. Tensors are read without autograd. A metric is used by one thread.
class Metric {
 public:
  virtual ~Metric() = default;

  /// Appends its values, each named `name`, with or without a suffix.
  virtual void append_values(const std::string& name, MetricValues& values) const = 0;
  /// Options, besides the type, that must be equal on all ranks: "top_k 1". Empty: none.
  virtual std::string options() const { return {}; }
  /// Clears all counts.
  void reset();

 protected:
  /// `numbers`: how many numbers it counts.
  explicit Metric(int64_t numbers);
  Metric(const Metric&) = default;
  Metric(Metric&&) = default;
  Metric& operator=(const Metric&) = default;
  Metric& operator=(Metric&&) = default;

  /// Returns the counts, for an update to add to.
  double* begin_update();
  /// Adds an update's counts, double [numbers], on their device and without waiting.
  void add(const at::Tensor& numbers);
  /// The counts; waits for the device.
  const std::vector<double>& numbers() const;

 private:
  friend class Metrics;
  void set_reduced(const double* numbers);
  void take_from_device() const;
  /// The counts of a virtual rank, or of updates outside any (-1).
  std::vector<double> counted_for(int virtual_rank) const;

  mutable std::vector<double> numbers_;        // of virtual_rank_
  int virtual_rank_ = -1;                      // of the micro-batch that the last update belonged to; -1: none
  std::map<int, std::vector<double>> others_;  // of other virtual ranks
  mutable std::vector<double> sum_;            // the result of numbers(), if there are others
  mutable at::Tensor on_device_;               // counts not yet in numbers_; undefined: none
  bool reduced_ = false;
};

/// Several metrics that are reduced together, in one collective.
///
///     lockstep::Metrics metrics;
///     auto& loss = metrics.add("loss", lockstep::Mean());
///     auto& accuracy = metrics.add("accuracy", lockstep::Accuracy());
///     for (auto& [data, target] : train) {
///       ...
///       loss.update(batch_loss, target.size(0));
///       accuracy.update(scores, target);
///     }
///     metrics.reduce(context.group());                        // once an epoch, on every rank
///     for (auto& [name, value] : metrics.values()) ...        // the same on every rank
class Metrics {
 public:
  /// The metric lives as long as this object, at the same address.
  template <std::derived_from<Metric> M>
  M& add(const std::string& name, M metric) {
    auto owned = std::make_unique<M>(std::move(metric));
    M& kept = *owned;
    insert(name, std::move(owned));
    return kept;
  }

  /// Sums over all ranks what was counted since the last reduction. A collective: every rank of `group` must call it,
  /// with the same metrics (names, types, options, sizes) in the same order. It is one all-reduce of all numbers, or
  /// two if there are many. Throws Error like every collective, and also if another rank called reduce_failed() or has
  /// other metrics.
  void reduce(const Group& group);
  /// Replaces reduce() on a rank that has no result: the other ranks do not wait for it, but throw an Error that names
  /// it. Itself throws only what a collective may throw.
  void reduce_failed(const Group& group) { reduce(group, true); }
  void reset();

  MetricValues values() const;
  /// "loss 0.3412  accuracy 0.9207"
  std::string to_string() const;

 private:
  void insert(const std::string& name, std::unique_ptr<Metric> metric);
  void reduce(const Group& group, bool failed);
  /// The sums over all virtual ranks, in the order of their tree, if a rank works for several.
  std::vector<double> reduce_virtual_ranks(const Group& group) const;
  /// One line per metric: name, type, options and how many numbers it has.
  std::string description() const;
  std::vector<std::pair<std::string, std::unique_ptr<Metric>>> metrics_;
};

/// The weighted mean of numbers, such as a loss. NaN before the first update.
class Mean : public Metric {
 public:
  Mean() : Metric(2) {}
  /// `weight` is the number of samples over which `value` is the mean.
  void update(double value, int64_t weight = 1);
  /// A tensor of one element; if it has several, each counts with `weight`. TORCH_CHECK fails for an undefined tensor.
  void update(const at::Tensor& value, int64_t weight = 1);
  double value() const;
  /// The sum of all weights.
  int64_t count() const;
  void append_values(const std::string& name, MetricValues& values) const override;
};

/// exp of the mean negative log-likelihood: update(cross_entropy, tokens).
class Perplexity : public Mean {
 public:
  double value() const;
  void append_values(const std::string& name, MetricValues& values) const override;
};

struct AccuracyOptions {
  /// A sample is correct if fewer classes than this score better than its own.
  int64_t top_k = 1;
  /// Targets with this value are not counted, as in cross_entropy.
  int64_t ignore_index = -100;
};

/// The share of samples whose class scores best, or is among the top_k best. Among equal scores the lower class wins,
/// as in argmax. NaN beats every number, and a class whose own score is NaN is never correct.
class Accuracy : public Metric {
 public:
  explicit Accuracy(AccuracyOptions options = {});
  /// scores [..., classes], floating point; target int64 [...]. Throws c10::Error for other shapes and, on the CPU, for
  /// a target that is not a class.
  void update(const at::Tensor& scores, const at::Tensor& target);
  /// NaN before the first sample.
  double value() const;
  int64_t correct() const;
  int64_t count() const;
  void append_values(const std::string& name, MetricValues& values) const override;
  std::string options() const override;

 private:
  AccuracyOptions options_;
};

/// Counts of samples by their class and their predicted class.
class ConfusionMatrix : public Metric {
 public:
  explicit ConfusionMatrix(int64_t classes, int64_t ignore_index = -100);
  /// scores: [..., classes], floating point, the best class counts; or int64 [...], classes. target: int64 [...].
  /// Throws c10::Error as Accuracy does.
  void update(const at::Tensor& scores, const at::Tensor& target);

  /// int64 [classes, classes]. Rows are true classes, columns predicted ones.
  at::Tensor counts() const;
  double accuracy() const;
  /// precision: of all samples predicted as `of`, the share that is `of`. recall: of all samples of `of`, the share
  /// predicted so. f1: the harmonic mean of both. Each is 0 if its divisor is.
  double precision(int64_t of) const;
  double recall(int64_t of) const;
  double f1(int64_t of) const;
  /// Number of samples of the class.
  int64_t support(int64_t of) const;
  /// `name`_accuracy, and `name`_precision, _recall and _f1: means over the classes that occur.
  void append_values(const std::string& name, MetricValues& values) const override;
  std::string options() const override;

 private:
  double at(int64_t row, int64_t column) const { return numbers()[static_cast<size_t>(row * classes_ + column)]; }
  double row_sum(int64_t row) const;
  double column_sum(int64_t column) const;

  int64_t classes_;
  int64_t ignore_index_;
};

}  // namespace lockstep
