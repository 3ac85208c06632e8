#pragma once

#include <utility>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

/// The mean loss of each epoch that is done, over all ranks, and this rank's of the epoch in hand.
class EpochLosses {
 public:
  EpochLosses() = default;
  explicit EpochLosses(std::vector<double> done) : done_(std::move(done)) {}

  const std::vector<double>& done() const { return done_; }
  int count() const { return static_cast<int>(done_.size()); }

  /// `mean` goes on from what was kept of the epoch.
  void begin(lockstep::Mean& mean) const {
    if (samples_ > 0) mean.update(value_, samples_);
  }
  void note(const lockstep::Mean& mean) {
    value_ = mean.value();
    samples_ = mean.count();
  }
  /// `mean` is over all ranks.
  void end(const lockstep::Mean& mean) {
    samples_ = 0;
    done_.push_back(mean.value());
  }

  /// For ranks that are started again, on another number of them as well. This object outlives the checkpointer.
  void add_to(lockstep::Checkpointer& checkpointer, bool is_main) {
    using torch::kDouble;
    checkpointer.add("losses", {.save = [this] { return c10::IValue(torch::tensor(done_, kDouble)); },
                                .load = [this](const c10::IValue& kept) { done_ = values_of(kept); }});
    checkpointer.add("epoch_loss",
                     {.save =
                          [this] {
                            return c10::IValue(torch::tensor({value_, static_cast<double>(samples_)}, kDouble));
                          },
                      .load = [this](const c10::IValue& kept) { take({kept}); },
                      // On another number of ranks rank 0 takes them all.
                      .load_from_ranks =
                          [this, is_main](const std::vector<c10::IValue>& ranks) {
                            if (is_main) take(ranks);
                          }},
                     lockstep::Checkpointer::Scope::kEachRank);
  }

 private:
  void take(const std::vector<c10::IValue>& ranks) {
    lockstep::Mean all;
    for (const c10::IValue& rank : ranks)
      if (const auto kept = values_of(rank); kept[1] > 0) all.update(kept[0], static_cast<int64_t>(kept[1]));
    samples_ = all.count();
    value_ = samples_ > 0 ? all.value() : 0;
  }
  static std::vector<double> values_of(const c10::IValue& kept) {
    const torch::Tensor numbers = kept.toTensor();
    const double* values = numbers.const_data_ptr<double>();
    return {values, values + numbers.numel()};
  }

  std::vector<double> done_;
  double value_ = 0;
  int64_t samples_ = 0;  ///< that value_ is the mean of
};
