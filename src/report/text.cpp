#include "report/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "observe/progress_text.h"

namespace lockstep {
namespace {

std::string as_utf8(std::string_view text) {
  const std::string quoted = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return nlohmann::json::parse(quoted).get<std::string>();
}

}  // namespace

std::string html(std::string_view raw) {
  std::string out;
  for (const char c : as_utf8(raw)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f)
      out += "\xef\xbf\xbd";
    else
      out += c;
  }
  return out;
}

std::string url_path(std::string_view path) {
  std::string out;
  for (const char c : path) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (plain || std::string_view("/-._~").find(c) != std::string_view::npos)
      out += c;
    else
      out += formatted("%%%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
  }
  return out;
}

std::string short_number(double value) {
  const double size = std::fabs(value);
  if (!std::isfinite(value)) return std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  if (value == 0) return "0";
  if (size >= 1e9 || size < 1e-4) return formatted("%.3g", value);
  if (size >= 1000) return with_thousands(value);
  const int decimals = std::clamp(3 - static_cast<int>(std::floor(std::log10(size))), 0, 7);
  std::string text = formatted("%.*f", decimals, value);
  if (text.find('.') == std::string::npos) return text;
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string milliseconds(double value) {
  return (value < 1e-3   ? "0"
          : value >= 100 ? with_thousands(value)
                         : formatted(value >= 10 ? "%.1f" : "%.2f", value)) +
         " ms";
}

std::string percent(double share) { return formatted(share < 0.1 ? "%.1f %%" : "%.0f %%", 100 * share); }

std::string byte_size(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double size = static_cast<double>(bytes);
  size_t unit = 0;
  for (; size >= 1000 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  return formatted(size < 10 && unit > 0 ? "%.1f " : "%.0f ", size) + kUnits[unit];
}

std::string time_taken(double seconds) {
  seconds = std::clamp(std::isfinite(seconds) ? seconds : 0.0, 0.0, 1e10);
  if (seconds < 10) return formatted("%.1f s", seconds);
  const long long whole = std::llround(seconds);
  if (whole < 60) return formatted("%lld s", whole);
  if (whole < 3600) return formatted("%lld min %lld s", whole / 60, whole % 60);
  return formatted("%lld h %lld min", whole / 3600, whole / 60 % 60);
}

std::string utc_time(double wall_seconds) {
  if (!(wall_seconds > 0 && wall_seconds < 2e11)) return "at an unknown time";
  const auto time = static_cast<std::time_t>(wall_seconds);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

std::string counted(int64_t count, std::string_view thing) {
  return (count == 0 ? "no" : with_thousands(static_cast<double>(count))) + " " + std::string(thing) +
         (count == 1 ? "" : "s");
}

std::string px(double value) {
  std::string text = formatted("%.1f", std::isfinite(value) ? std::clamp(value, -1e5, 1e5) : 0.0);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

}  // namespace lockstep
