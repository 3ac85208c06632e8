#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

// JSON, written piece by piece, for lines that must cost almost nothing.

/// The shortest text that reads back as the same number. NaN and infinities, which JSON lacks, become the strings
/// "NaN", "Infinity" and "-Infinity".
void append_json(std::string& out, double value);
void append_json(std::string& out, int64_t value);
/// In quotation marks. Invalid UTF-8 becomes U+FFFD.
void append_json(std::string& out, std::string_view text);

/// `"name":value` with a comma before it unless it is the first in its object.
template <typename Value>
void append_member(std::string& out, std::string_view name, Value value) {
  if (!out.empty() && out.back() != '{') out += ',';
  append_json(out, name);
  out += ':';
  append_json(out, value);
}

}  // namespace lockstep
