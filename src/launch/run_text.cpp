#include "launch/run_text.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

using std::chrono::milliseconds;

std::string signal_name(int signal) { return std::string("SIG") + ::sigabbrev_np(signal); }

std::string counted_ranks(int ranks) { return std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks"); }

std::string earlier_starts(int restarts, int resizes) {
  std::string text;
  if (restarts > 0) text = std::to_string(restarts) + (restarts == 1 ? " restart" : " restarts");
  if (resizes > 0)
    text += (text.empty() ? "" : " and ") + std::to_string(resizes) + (resizes == 1 ? " resize" : " resizes");
  return text;
}

std::string list_lines(const Stall& stall) {
  std::string text;
  for (const auto& line : stall.lines) text += "\n  " + line;
  return text;
}

std::string in_seconds(Clock::duration time) {
  const auto tenths = std::chrono::duration_cast<milliseconds>(time).count() / 100;
  std::string text = std::to_string(tenths / 10);
  if (tenths % 10 != 0) text += '.' + std::to_string(tenths % 10);
  return text + " s";
}

std::string patience_text(const std::vector<RankView>& ranks) {
  milliseconds longest(0);
  for (const auto& rank : ranks)
    if (waits(rank)) longest = std::max(longest, rank.account.collective_timeout);
  if (longest == milliseconds(0)) return "the others wait until their collective's timeout";
  return "the others wait for up to " + in_seconds(longest) + " (ContextOptions::collective_timeout)";
}

}  // namespace lockstep
