#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "report/curve.h"
#include "report/svg.h"

namespace lockstep {

struct ChartLine {
  std::string name;
  int colour = 1;  ///< index into the page's style, from 1
  std::vector<Curve::Point> points;
};

/// Curves over steps.
struct LineChart {
  std::string id;  ///< unique on the page
  std::string title;
  std::string unit;  ///< shown next to the title; may be empty
  std::vector<ChartLine> lines;
  std::map<int64_t, int64_t> epochs;  ///< first step of each, from 0
  bool share = false;                 ///< values from 0 to 1, labelled in per cent
  bool from_zero = false;
  bool falls = false;  ///< a loss: its end matters most
};

/// A varying line with many points is drawn as means of neighbours, in front of a pale band from minimum to maximum.
struct Smoothing {
  double steps = 0;  ///< steps per mean; 0: drawn as it is
  double last = 0;   ///< the last value, or the mean of the last steps
};
Smoothing smoothing_of(const ChartLine& line, const DrawingSize& size);

/// Whether the values span so wide a range that the axis should be logarithmic.
bool has_logarithmic_axis(const LineChart& chart, const DrawingSize& size);

std::string draw_line_chart(const LineChart& chart, const DrawingSize& size);

}  // namespace lockstep
