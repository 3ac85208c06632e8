#pragma once

#include <string>
#include <vector>

#include "report/line_chart.h"
#include "report/run_data.h"

namespace lockstep {

/// A chart and what its legend says of each line.
struct ScalarChart {
  LineChart chart;
  struct Entry {
    std::string name;
    int colour;
    double last, best;  ///< best is of single values: only told where few of them make the line
    int64_t not_finite;
    double first_not_finite;
  };
  std::vector<Entry> entries;
  bool higher_is_better = false;
};

/// The logged scalars as charts. Names that differ only by a part train, valid, val, test or eval share one, as
/// "train/loss" and "valid/loss" do. Loss first, then accuracy, the others, the learning rate last.
std::vector<ScalarChart> scalar_charts(const RunData& run);

/// Samples a second of all ranks that are there. Ranks take their steps together, so one rank's steps count for all.
Curve throughput(const RunData& run);
double mean_throughput(const RunData& run);
/// How long ranks stand still for others, a line a rank; of many ranks the least and the most waiting one.
LineChart communication_chart(const RunData& run);
double mean_communication_share(const RunData& run);

}  // namespace lockstep
