#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "report/charts.h"
#include "report/page.h"

namespace lockstep {

/// Topics that the page omits because they were not recorded, listed in one line below the cards instead of as empty
/// cards.
class NotRecorded {
 public:
  /// `what` is, for example, "late ranks"; `how` says how to record it. Returns the card that is not drawn: "".
  std::string add(const std::string& what, const std::string& how);
  /// As HTML; "" if everything was recorded.
  std::string line() const;

 private:
  std::vector<std::pair<std::string, std::string>> parts_;  ///< what, and how; the same advice once
};

// The cards of the page, as HTML. Topics that cannot be drawn go into `left_out`.

/// The width of drawings next to each other on a wide page; legends describe these drawings' smoothing.
constexpr DrawingSize kWideChart{"wide", 525, 250};

std::string scalar_sections(std::vector<ScalarChart>& charts, const RunData& run, NotRecorded& left_out);
std::string throughput_section(const RunData& run, NotRecorded& left_out);
std::string communication_section(const RunData& run, NotRecorded& left_out);
std::string bucket_section(const RunData& run, NotRecorded& left_out);
std::string late_section(const RunData& run, NotRecorded& left_out);
std::string step_section(const std::map<int, TraceOfRank>& traces, const RunData& run, NotRecorded& left_out);
std::string starts_section(const RunData& run);
std::string system_section(const RunData& run, NotRecorded& left_out);
std::string command_section(const PageContent& content);

}  // namespace lockstep
