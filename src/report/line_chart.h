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
  int colour = 1;  ///< of the page's style, from 1
  std::vector<Curve::Point> points;
};

/// Curves over steps.
struct LineChart {
  std::string id;  ///< of its own on the page
  std::string title;
  std::string unit;  ///< beside the title; may be empty
  std::vector<ChartLine> lines;
  std::map<int64_t, int64_t> epochs;  ///< first step of each, from 0
  bool share = false;                 ///< values from 0 to 1, labelled as per cent
  bool from_zero = false;
};

/// Smooths a line that has many points, over so many steps; the points themselves stay as a pale band. 0: drawn as it
/// is.
double smoothed_steps(const ChartLine& line, const DrawingSize& size);

std::string draw_line_chart(const LineChart& chart, const DrawingSize& size);

}  // namespace lockstep
