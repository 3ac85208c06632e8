#include "observe/progress_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/text.h"

namespace lockstep {
namespace {

std::string epoch_text(const ProgressState& state) {
  if (!state.label.empty()) return printable(state.label);
  const std::string epoch = "epoch " + std::to_string(state.epoch + 1);
  return state.epochs > 0 ? epoch + "/" + std::to_string(state.epochs) : epoch;
}

std::string loss_text(double loss) {
  const double size = std::fabs(loss);
  const bool plain = size == 0 || (size >= 1e-3 && size < 1e4) || !std::isfinite(loss);
  return formatted(plain ? "loss %.4f" : "loss %.3e", loss);
}

std::string rate_text(double rate) {
  return (rate < 10 ? formatted("%.1f", rate) : with_thousands(rate)) + " samples/s";
}

}  // namespace

std::string with_thousands(double value) {
  const std::string digits = formatted("%.0f", std::fabs(value));
  std::string text = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && std::isfinite(value)) text += ',';
    text += digits[i];
  }
  return text;
}

std::string minutes_and_seconds(double seconds) {
  constexpr double kLongest = 100 * 365 * 86400.0;  // also the limit for divisions by nearly zero
  const int64_t whole = static_cast<int64_t>(std::ceil(std::clamp(std::isnan(seconds) ? 0.0 : seconds, 0.0, kLongest)));
  const long long hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  return hours > 0 ? formatted("%lld:%02lld:%02lld", hours, minutes, rest) : formatted("%lld:%02lld", minutes, rest);
}

std::string progress_text(const ProgressState& state, int columns) {
  // In the order of the line. Fields with higher numbers are left out first.
  struct Field {
    std::string text;
    int dispensable;
  };
  std::array<Field, 6> fields{
      Field{epoch_text(state), 1},
      Field{"step " + std::to_string(state.step) + "/" + std::to_string(state.steps), 0},
      Field{state.loss ? loss_text(*state.loss) : "", 2},
      Field{state.samples_per_second ? rate_text(*state.samples_per_second) : "", 4},
      Field{state.communication_share
                ? formatted("comm %.0f %%", 100 * std::clamp(*state.communication_share, 0.0, 1.0))
                : "",
            5},
      Field{state.seconds_taken  ? "time " + minutes_and_seconds(*state.seconds_taken)
            : state.seconds_left ? "ETA " + minutes_and_seconds(*state.seconds_left)
                                 : "",
            3},
  };
  const size_t room = static_cast<size_t>(std::max(columns, 0));
  for (int limit = 5;; --limit) {
    std::string line;
    for (const auto& field : fields)
      if (!field.text.empty() && field.dispensable <= limit) line += (line.empty() ? "" : "  ") + field.text;
    if (line.size() <= room || limit == 0) return line.substr(0, room);
  }
}

}  // namespace lockstep
