#include "observe/json_text.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace lockstep {

void append_json(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
    return;
  }
  out += decimal(value);
}

void append_json(std::string& out, int64_t value) { out += decimal(value); }

void append_json(std::string& out, std::string_view text) {
  const auto is_plain = [](unsigned char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; };
  for (const char c : text) {
    if (is_plain(static_cast<unsigned char>(c))) continue;
    out += nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return;
  }
  out += '"';
  out += text;
  out += '"';
}

}  // namespace lockstep
