#pragma once

#include <cstdio>
#include <cstring>
#include <string>

namespace lockstep {

/// One entry of a tar archive as POSIX's ustar has it, byte by byte.
inline std::string tar_entry(const std::string& name, const std::string& content, char type = '0',
                             const std::string& link = "", size_t claimed = std::string::npos) {
  std::string header(512, '\0');
  const auto put = [&](size_t at, const std::string& text) { header.replace(at, text.size(), text); };
  const auto octal = [](size_t value, int digits) {
    char text[32];
    std::snprintf(text, sizeof(text), "%0*zo", digits, value);
    return std::string(text);
  };
  put(0, name);
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, octal(claimed != std::string::npos ? claimed : content.size(), 11));
  put(136, "00000000000");
  put(148, "        ");
  header[156] = type;
  put(157, link);
  put(257, std::string("ustar\0"
                       "00",
                       8));
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  put(148, octal(sum, 6) + std::string("\0 ", 2));
  return header + content + std::string((512 - content.size() % 512) % 512, '\0');
}

inline std::string tar_end() { return std::string(1024, '\0'); }

}  // namespace lockstep
