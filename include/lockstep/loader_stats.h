#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <string>

namespace lockstep {

/// How one pass over a DataLoader spent its time on this rank, up to the newest batch or the end.
struct LoaderStats {
  int64_t batches = 0;
  int workers = 0;
  /// Since the start of the pass.
  double seconds = 0;
  /// The part of that time in which the loop waited for the next batch or, without workers, made it.
  double waiting_seconds = 0;
  /// Summed over the workers: getting samples from the dataset (files, decoding, collecting), and transforms.
  double reading_seconds = 0;
  double transform_seconds = 0;

  /// One line that says what to do, such as
  ///
  ///     training waited 41 % of the epoch for data; most of the loader's time is transforms; more workers (now 1) may
  ///     help
  ///
  /// (in one line), or "" if the loop waited less than 5 % of its time.
  std::string advice() const;
};

}  // namespace lockstep
