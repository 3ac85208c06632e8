#include "base/text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <sstream>

#include "base/rank_names.h"

namespace lockstep {
namespace {

/// The length of the UTF-8 character at the start, or 0 if none. Source: RFC 3629, section 4.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0);
  if (first >= 0x20 && first < 0x7f) return 1;
  if (first >= 0xc2 && first < 0xe0 && follows(1)) return first == 0xc2 && byte(1) < 0xa0 ? 0 : 2;  // no C1 controls
  if (first >= 0xe0 && first < 0xf0 && follows(1) && follows(2)) {
    const bool overlong = first == 0xe0 && byte(1) < 0xa0, surrogate = first == 0xed && byte(1) >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xf0 && first < 0xf5 && follows(1) && follows(2) && follows(3)) {
    const bool overlong = first == 0xf0 && byte(1) < 0x90, too_large = first == 0xf4 && byte(1) >= 0x90;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    size_t plain = 0;
    while (plain < text.size() && text[plain] >= 0x20 && text[plain] < 0x7f) ++plain;
    result += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const size_t bytes = character_bytes(text);
    if (bytes > 0) {
      result += text.substr(0, bytes);
      text.remove_prefix(bytes);
      continue;
    }
    result += formatted("\\x%02x", static_cast<unsigned char>(text[0]));
    text.remove_prefix(1);
  }
  return result;
}

std::string printable_line(std::string_view text) { return printable(text.substr(0, text.find('\n'))); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

int number_in(const std::optional<std::string>& text) {
  int value = -1;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

std::string first_difference(const std::string& kind, const std::vector<std::string>& descriptions) {
  std::vector<std::vector<std::string>> lists;
  size_t longest = 0;
  for (const auto& description : descriptions) {
    lists.push_back(lines_of(description));
    longest = std::max(longest, lists.back().size());
  }
  for (size_t i = 0; i < longest; ++i) {
    std::vector<std::string> at_i;
    for (const auto& list : lists)
      at_i.push_back(i < list.size() ? list[i] : "nothing (it has " + std::to_string(list.size()) + ")");
    const auto other = std::find_if(at_i.begin(), at_i.end(), [&](const auto& line) { return line != at_i.front(); });
    if (other == at_i.end()) continue;
    return kind + " " + std::to_string(i) + " is `" + at_i.front() + "` on " + ranks_with(at_i, at_i.front()) +
           " and `" + *other + "` on " + ranks_with(at_i, *other);
  }
  return "";
}

}  // namespace lockstep
