#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::faultbox {

/// A line that the launcher wrote on stderr, and when it came.
struct Line {
  int64_t at_ns = 0;
  std::string text;
};

/// What the launcher made of a failure, from its lines and its report.json.
struct Report {
  std::optional<int> culprit;
  std::string headline;  ///< of the block: "rank 1 of 3 failed first: killed by SIGKILL (Killed)"
  std::vector<int> also_suspect;
  std::string text;                   ///< all lines
  std::optional<int64_t> known_ns;    ///< when the first line came that tells of a failure
  std::vector<std::string> problems;  ///< lines and JSON that contradict each other, fields that lack
};

/// `json` is the content of report.json, empty where there is none.
Report read_report(const std::vector<Line>& lines, const std::string& json, int exit_code);

}  // namespace lockstep::faultbox
