#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

/// For text between tags and in attributes in double quotes: & < > " ' become references; control characters, which
/// HTML forbids, and invalid UTF-8 become U+FFFD.
std::string html(std::string_view text);
/// A relative path as the value of href, before html(): anything but letters, digits, slashes and -._~ becomes %XX.
std::string url_path(std::string_view path);

/// Four significant digits: "0.1866", "1,234", "1.2e-05".
std::string short_number(double value);
std::string milliseconds(double value);     ///< three digits: "1.47 ms"
std::string percent(double share);          ///< 0.027: "2.7 %"
std::string byte_size(int64_t bytes);       ///< "2.4 KiB", "25 MiB"
std::string time_taken(double seconds);     ///< "41 s", "3 min 20 s", "2 h 5 min"
std::string utc_time(double wall_seconds);  ///< "2026-11-21 07:42:01 UTC"
/// "no steps", "1 step", "1,234 steps".
std::string counted(int64_t count, std::string_view thing);
/// A coordinate of a drawing: at most one decimal.
std::string px(double value);

}  // namespace lockstep
