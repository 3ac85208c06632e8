#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "report/axis.h"
#include "report/run_data.h"
#include "report/svg.h"

namespace lockstep {

/// The most buckets that are drawn; the page says how many are left out.
constexpr size_t kMostBucketsDrawn = 24;
/// The most ranks that are drawn: those that were last most often.
constexpr size_t kMostRanksDrawn = 24;

/// The axis below bars, with a mark at each tick.
void draw_bottom_axis(Svg& svg, const Scale& x, const std::vector<Tick>& marks, double bottom, std::string_view unit);

/// The median of the values; 0 if none.
double median(std::vector<float> values);

/// Milliseconds from the first gradient to the end of backward on this rank, after which it waits.
double backward_end_ms(const ReductionData& reductions);

/// A bar for each bucket: its gradients arrive, it is ready, it is handed over, it is reduced.
std::string draw_buckets(const ReductionData& reductions, double width, const char* layout);

/// A bar for each rank: the share of reductions in which it came last.
std::string draw_late_ranks(const ReductionData& reductions, double width, const char* layout);

}  // namespace lockstep
