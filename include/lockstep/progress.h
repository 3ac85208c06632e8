#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

namespace lockstep {

class ProgressDisplay;

struct ProgressOptions {
  /// Shown instead of "epoch 2/5", for example "test".
  std::string label{};
};

/// One line on stderr that shows the progress of a pass:
///
///     epoch 2/5  step 180/468  loss 0.3412  14,210 samples/s  comm 7 %  ETA 0:42
///
/// If stderr is a terminal, or the launcher passes it on to one, the line is redrawn in place, at most ten times a
/// second; otherwise a plain line appears every ten seconds. The last state always remains as a plain line. It is never
/// wider than the terminal: the least important parts are left out.
///
/// Used by one thread. Only rank 0 shows it, with its own numbers; all ranks may make the same calls.
class ProgressLine {
 public:
  struct Pass {
    std::string label{};     ///< instead of the epoch
    int epoch = 0;           ///< counts from 0
    int epochs = 0;          ///< 0: not known
    int64_t steps = 0;       ///< calls of step() in this pass, including first_step
    int64_t first_step = 0;  ///< done before the pass, when an epoch is resumed
    int rank = 0;
    int world_size = 1;
    /// Calls of step() per optimizer step, which the line counts: more than one with virtual ranks or accumulation. The
    /// last step may have fewer.
    int64_t batches_per_step = 1;
    double share = 0;  ///< this rank's share of all samples; 0: equal shares
  };

  /// Shows nothing.
  ProgressLine() noexcept;
  explicit ProgressLine(Pass pass);
  ProgressLine(ProgressLine&&) noexcept;
  ProgressLine& operator=(ProgressLine&&) noexcept;
  /// Finishes.
  ~ProgressLine();

  /// Reports a batch of `samples` samples on this rank. The line assumes that the other ranks do theirs meanwhile.
  void step(int64_t samples);
  /// The loss to show from now on.
  void loss(double value);
  /// Seconds spent in communication since some fixed moment. The line shows their share of the time since the first
  /// call.
  void communication(double total_seconds);
  /// Prints the last state as a plain line, with averages over the whole pass. Nothing is shown afterwards.
  void finish();

 private:
  std::unique_ptr<ProgressDisplay> display_;  // null if nothing is shown
};

/// A loader that shows the progress of the loop over it. Made by `progress`.
template <typename Loader>
class Progress {
 public:
  class Iterator {
   public:
    using Inner = decltype(std::declval<Loader&>().begin());
    using value_type = typename Inner::value_type;
    using difference_type = std::ptrdiff_t;

    decltype(auto) operator*() const { return *inner_; }
    Iterator& operator++() {
      progress_->line_.step(samples_);
      ++inner_;
      look();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return inner_ == std::default_sentinel; }

   private:
    friend class Progress;
    Iterator(Progress* progress, Inner inner) : progress_(progress), inner_(std::move(inner)) { look(); }
    /// Counts the samples before the loop can move them away.
    void look() {
      if (inner_ == std::default_sentinel)
        progress_->line_.finish();
      else
        samples_ = samples_of(inner_);
    }
    static int64_t samples_of(const Inner& inner) {
      if constexpr (requires { inner.samples(); }) {
        return inner.samples();
      } else {
        return (*inner).data.size(0);
      }
    }
    Progress* progress_;
    Inner inner_;
    int64_t samples_ = 0;
  };

  Progress(Loader& loader, ProgressOptions options) : loader_(&loader), options_(std::move(options)) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Starts a pass and a new line.
  Iterator begin() {
    line_ = ProgressLine(pass());
    return Iterator(this, loader_->begin());
  }
  std::default_sentinel_t end() const { return {}; }

  /// The loss to show from now on.
  void loss(double value) { line_.loss(value); }
  /// Seconds spent in communication since some fixed moment, e.g. DistributedDataParallel's communication_seconds().
  void communication(double total_seconds) { line_.communication(total_seconds); }

 private:
  ProgressLine::Pass pass() const {
    ProgressLine::Pass pass{.label = options_.label,
                            .epoch = loader_->epoch(),
                            .epochs = loader_->epoch_count(),
                            .steps = loader_->size(),
                            .rank = loader_->rank(),
                            .world_size = loader_->world_size()};
    if constexpr (requires { loader_->first_step() + loader_->steps_left(); }) {
      pass.first_step = loader_->first_step();
      pass.steps = pass.first_step + loader_->steps_left();
    }
    if constexpr (requires { loader_->batches_per_step() * loader_->share(); }) {
      pass.batches_per_step = loader_->batches_per_step();
      pass.share = loader_->share();
    }
    return pass;
  }

  Loader* loader_;
  ProgressOptions options_;
  ProgressLine line_;
};

/// Use `for (auto& [data, target] : lockstep::progress(train))` or, to show more,
///
///     auto bar = lockstep::progress(train);
///     for (auto& [data, target] : bar) {
///       ...
///       bar.loss(loss.item<double>());
///     }
///
/// Every rank may call it; rank 0 shows the line. `loader` must outlive the result.
template <typename Loader>
Progress<Loader> progress(Loader& loader, ProgressOptions options = {}) {
  return Progress<Loader>(loader, std::move(options));
}

}  // namespace lockstep
