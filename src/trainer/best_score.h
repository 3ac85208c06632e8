#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace lockstep {

/// The best score of a training, and the number of epochs without a better one.
struct BestScore {
  double score = std::numeric_limits<double>::quiet_NaN();
  int epoch = -1;  ///< counts from 0; -1: there was no score
  int waited = 0;  ///< epochs without a better one

  /// Records the score of an epoch. Returns whether it is the best; a non-finite score never is.
  bool take(double value, int of_epoch, bool higher_is_better) {
    const bool better = higher_is_better ? value > score : value < score;
    const bool is_best = std::isfinite(value) && (better || epoch < 0);
    waited = is_best ? 0 : waited + 1;
    if (is_best) score = value, epoch = of_epoch;
    return is_best;
  }
};

/// The loss of this rank's samples.
struct LossSum {
  double sum = 0;
  int64_t samples = 0;

  void add(double mean, int64_t of_samples) { sum += mean * static_cast<double>(of_samples), samples += of_samples; }
};

}  // namespace lockstep
