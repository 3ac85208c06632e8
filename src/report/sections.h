#pragma once

#include <map>
#include <string>
#include <vector>

#include "report/charts.h"
#include "report/page.h"

namespace lockstep {

// The cards of the page, as HTML. If there is nothing to draw, a card says what is missing and how to get it.

/// The width of drawings beside each other on a wide page; legends describe the smoothing of these.
constexpr DrawingSize kWideChart{"wide", 525, 250};

std::string scalar_sections(std::vector<ScalarChart>& charts, const RunData& run);
std::string throughput_section(const RunData& run);
std::string communication_section(const RunData& run);
std::string bucket_section(const RunData& run);
std::string late_section(const RunData& run);
std::string step_section(const std::map<int, TraceOfRank>& traces, const RunData& run);
std::string starts_section(const RunData& run);
std::string system_section(const RunData& run);
std::string command_section(const PageContent& content);

}  // namespace lockstep
