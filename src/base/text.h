#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// "1 pass", "2 passes".
inline std::string counted(int64_t number, const char* one, const char* several) {
  return std::to_string(number) + " " + (number == 1 ? one : several);
}

/// The shortest digits that read back as the same number.
template <typename Number>
std::string decimal(Number value) {
  std::array<char, 32> digits;
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr};
}

/// The text in a form that is safe on a terminal: control characters and invalid UTF-8 become \xNN.
std::string printable(std::string_view text);

/// Its first line in that form.
std::string printable_line(std::string_view text);

/// The text's lines, without their ends.
std::vector<std::string> lines_of(const std::string& text);

/// At most 159 characters of what printf() would print.
std::string formatted(const char* format, auto... values) {
  std::array<char, 160> text;
  const int length = std::snprintf(text.data(), text.size(), format, values...);
  return std::string(text.data(), std::clamp<int>(length, 0, text.size() - 1));
}

/// The number at the text's beginning; -1: there is none.
int number_in(const std::optional<std::string>& text);

/// The first difference between ranks' descriptions of something they must agree on, or an empty string: "option 1 is
/// `shuffle` on ranks 0, 2 and `no shuffle` on rank 1". Line i of a description is the `kind` numbered i.
std::string first_difference(const std::string& kind, const std::vector<std::string>& descriptions);

}  // namespace lockstep
