#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace lockstep {

/// A word as it must appear in a shell's command line: in single quotes, unless it consists of characters that no shell
/// treats specially (letters, digits, _-+=./:,@% and all non-ASCII characters).
inline std::string shell_word(std::string_view word) {
  const auto is_plain = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c >= 0x80 ||
           std::string_view("_-+=./:,@%").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return std::string(word);
  std::string quoted = "'";
  for (const char c : word) c == '\'' ? quoted += "'\\''" : quoted += c;
  return quoted + "'";
}

}  // namespace lockstep
