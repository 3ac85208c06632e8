#pragma once

#include <string>
#include <vector>

#include "report/line_chart.h"
#include "report/run_data.h"

namespace lockstep {

/// A chart, and the legend's entry for each line.
struct ScalarChart {
  LineChart chart;
  struct Entry {
    std::string name;
    int colour;
    double last, best;  ///< best is a single value, shown only if few values make up the line
    int64_t not_finite;
    double first_not_finite;
  };
  std::vector<Entry> entries;
  bool higher_is_better = false;
};

/// The logged scalars as charts. Names that differ only in a part "train", "valid", "val", "test" or "eval" share a
/// chart, such as "train/loss" and "valid/loss". Loss comes first, then accuracy, then the others, and the learning
/// rate last.
std::vector<ScalarChart> scalar_charts(const RunData& run);

/// Samples per second of all ranks in the folder. Ranks take their steps together, so one rank's steps count for all.
Curve throughput(const RunData& run);
double mean_throughput(const RunData& run);
bool knows_communication(const RunData& run);
/// How long ranks wait for others, one line per rank; with many ranks, those that wait least and most.
LineChart communication_chart(const RunData& run);
double mean_communication_share(const RunData& run);

}  // namespace lockstep
