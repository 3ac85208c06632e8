#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::faultbox {

/// A line that the launcher wrote to stderr, and when it arrived.
struct Line {
  int64_t at_ns = 0;
  std::string text;
};

/// What the launcher reported about a failure, in its lines and its report.json.
struct Report {
  std::optional<int> culprit;
  std::string headline;  ///< of the block: "rank 1 of 3 failed first: killed by SIGKILL (Killed)"
  std::vector<int> also_suspect;
  std::string text;                   ///< all lines
  std::optional<int64_t> known_ns;    ///< when the first line about the last start's failure arrived
  std::vector<std::string> problems;  ///< contradictions between lines and JSON, missing fields
};

/// `json` is the content of report.json, or empty.
Report read_report(const std::vector<Line>& lines, const std::string& json, int exit_code);

}  // namespace lockstep::faultbox
