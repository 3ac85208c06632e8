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

/// Counts on this rank, summed over all ranks when its Metrics are reduced: exact however unevenly samples are
/// distributed. Each number is a double; counts are exact up to 2^53.
///
/// With virtual ranks, what is counted while a loader is at the batch of a virtual rank is kept apart, and the sum over
/// all of them has the same bits on any number of ranks.
///
/// Before it is reduced, a metric describes this rank's samples, afterwards those of all ranks. The next update starts
/// a new count by itself, so the same objects can be used in every epoch.
///
/// With tensors on a GPU, an update launches its kernels and does not wait; reading or reducing waits. Updates are not
/// collectives. Tensors are read without autograd. A metric is used by one thread.
class Metric {
 public:
  virtual ~Metric() = default;

  /// Appends its values, each named `name` or `name` and a suffix.
  virtual void append_values(const std::string& name, MetricValues& values) const = 0;
  /// The options that must be equal on all ranks besides the type: "top_k 1". Empty: none.
  virtual std::string options() const { return {}; }
  /// Forgets everything.
  void reset();

 protected:
  /// As many numbers as it counts.
  explicit Metric(int64_t numbers);
  Metric(const Metric&) = default;
  Metric(Metric&&) = default;
  Metric& operator=(const Metric&) = default;
  Metric& operator=(Metric&&) = default;

  /// For an update to add to.
  double* begin_update();
  /// Adds the counts of an update on a device, double [numbers]: there, without waiting.
  void add(const at::Tensor& numbers);
  /// The counts; waits for the device.
  const std::vector<double>& numbers() const;

 private:
  friend class Metrics;
  void set_reduced(const double* numbers);
  void take_from_device() const;
  /// The counts of a virtual rank, or of updates outside of any (-1).
  std::vector<double> counted_for(int virtual_rank) const;

  mutable std::vector<double> numbers_;        // of virtual_rank_
  int virtual_rank_ = -1;                      // whose micro-batch the last update belonged to; -1: there are none
  std::map<int, std::vector<double>> others_;  // of other virtual ranks
  mutable std::vector<double> sum_;            // what numbers() returned, if there are others
  mutable at::Tensor on_device_;               // what is not yet in numbers_; undefined: nothing
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

  /// Sums what was counted since the last time over all ranks. A collective: every rank of `group` calls it, with the
  /// same metrics (names, types, options, sizes) in the same order; it is one all-reduce of all their numbers, or two
  /// if there are many. Throws Error like every collective, and also if another rank called reduce_failed, or has other
  /// metrics.
  void reduce(const Group& group);
  /// Instead of reduce, on a rank that has no result: the other ranks do not wait for it, but throw an Error that names
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
  /// A line for each metric: name, type, options, how many numbers.
  std::string description() const;
  std::vector<std::pair<std::string, std::unique_ptr<Metric>>> metrics_;
};

/// The weighted mean of numbers, such as a loss. NaN before the first update.
class Mean : public Metric {
 public:
  Mean() : Metric(2) {}
  /// `weight` is the number of samples that the value is a mean of.
  void update(double value, int64_t weight = 1);
  /// A tensor of one element; if it has several, each counts with `weight`. TORCH_CHECK fails for an undefined one.
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
  /// A sample is correct if fewer than this many classes score better than its own.
  int64_t top_k = 1;
  /// Targets with this value are not counted, as in cross_entropy.
  int64_t ignore_index = -100;
};

/// The share of samples whose class scores best, or is among the best k. Among equal scores the lower class wins, as in
/// argmax; NaN beats every number, and a class whose own score is NaN is never correct.
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
  /// scores [..., classes], floating point, of which the best counts, or int64 [...]: classes. target int64 [...].
  /// Throws c10::Error as Accuracy does.
  void update(const at::Tensor& scores, const at::Tensor& target);

  /// int64 [classes, classes]. Row: the true class; column: the predicted one.
  at::Tensor counts() const;
  double accuracy() const;
  /// Of all samples predicted as `of`, the share that is; of all that are, the share predicted so; the harmonic mean of
  /// both. 0 if there is nothing to divide by.
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
