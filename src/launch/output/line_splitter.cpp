#include "launch/output/line_splitter.h"

#include <algorithm>

namespace lockstep {
namespace {

/// The end of a redrawn line, which erases the rest of a longer one before it on the terminal.
constexpr std::string_view kEraseToEnd = "\x1b[K";

}  // namespace

void LineSplitter::feed(std::string_view bytes, std::string& lines) {
  while (!bytes.empty()) {
    const size_t stop = bytes.find_first_of("\r\n");
    std::string_view piece = bytes.substr(0, stop);
    if (!piece.empty() && redrawn_) {
      line_.clear();
      redrawn_ = false;
    }
    while (line_.size() + piece.size() > kMaxLineBytes) {
      const size_t room = kMaxLineBytes - line_.size();
      lines.append(line_).append(piece.substr(0, room)).push_back('\n');
      line_.clear();
      piece.remove_prefix(room);
    }
    line_.append(piece);
    if (stop == std::string_view::npos) return;
    if (bytes[stop] == '\r') {
      redrawn_ = true;
    } else {
      if (line_.ends_with(kEraseToEnd)) line_.resize(line_.size() - kEraseToEnd.size());
      lines.append(line_).push_back('\n');
      line_.clear();
      redrawn_ = false;
    }
    bytes.remove_prefix(stop + 1);
  }
}

void LineSplitter::finish(std::string& lines) {
  if (!line_.empty()) lines.append(line_).push_back('\n');
  line_.clear();
  redrawn_ = false;
}

void Tail::add(std::string_view lines) {
  // Only the last kLines of a block can matter: find where they start.
  size_t start = lines.size();
  for (size_t count = 0; count <= kLines && start > 0; ++count) {
    const size_t newline = lines.rfind('\n', start - 1);
    start = newline == std::string_view::npos ? 0 : newline;
  }
  if (start > 0) ++start;
  for (lines.remove_prefix(std::min(start, lines.size())); !lines.empty();) {
    const size_t end = lines.find('\n');
    lines_.emplace_back(lines.substr(0, std::min(end, kLineBytes)));
    if (lines_.size() > kLines) lines_.pop_front();
    lines.remove_prefix(end + 1);
  }
}

}  // namespace lockstep
