#include "launch/output/rank_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace lockstep {
namespace {

/// The time stamp of a line that arrives now.
std::string time_stamp() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  std::tm utc{};
  ::gmtime_r(&now.tv_sec, &utc);
  std::array<char, 32> text{};
  const size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text.data() + length, text.size() - length, ".%03dZ ", static_cast<int>(now.tv_nsec / 1'000'000));
  return text.data();
}

}  // namespace

void RankLog::add(std::string_view lines) {
  if (lines.empty()) return;
  if (!file_) file_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  const std::string stamp = time_stamp();
  size_t lost = static_cast<size_t>(std::count(lines.begin(), lines.end(), '\n'));
  if (note_gap(stamp)) {
    std::string stamped;
    stamped.reserve(lines.size() + lost * stamp.size());
    while (!lines.empty()) {
      const size_t end = std::min(lines.find('\n'), lines.size() - 1) + 1;
      stamped.append(stamp).append(lines.substr(0, end));
      lines.remove_prefix(end);
    }
    const std::string_view left = write(stamped);
    lost = static_cast<size_t>(std::count(left.begin(), left.end(), '\n'));
  }
  gap_lines_ += lost;
  dropped_lines_ += lost;
}

/// Records the gap, before the first line after it. Returns false while the file accepts nothing.
bool RankLog::note_gap(const std::string& stamp) {
  if (gap_lines_ == 0) return true;
  std::string note = torn_ ? "\n" : "";
  note += stamp + "lockstep: " + std::to_string(gap_lines_) + " lines are missing here: " + drop_reason_ + "\n";
  if (!write(note).empty()) return false;
  gap_lines_ = 0;
  return true;
}

std::string_view RankLog::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(file_.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      drop_reason_ = std::strerror(errno);
      break;
    }
    torn_ = count > 0 ? text[static_cast<size_t>(count) - 1] != '\n' : torn_;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return text;
}

}  // namespace lockstep
