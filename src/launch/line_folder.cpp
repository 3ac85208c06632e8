#include "launch/line_folder.h"

#include <algorithm>

#include "launch/verdict.h"

namespace lockstep {

LineFolder::LineFolder(Sink& sink, std::vector<int> ranks) : sink_(sink), ranks_(std::move(ranks)) {}

void LineFolder::add(int rank, std::string_view lines, Clock::time_point now) {
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size() - 1) + 1;
    add_line(rank, lines.substr(0, end), now);
    lines.remove_prefix(end);
  }
}

void LineFolder::add_line(int rank, std::string_view line, Clock::time_point now) {
  const size_t first = next_[rank] > shown_ ? next_[rank] - shown_ : 0;
  size_t at = first;
  while (at < waiting_.size() && waiting_[at].line != line) ++at;
  if (at == waiting_.size()) at = insert(first, line, now);
  auto& ranks = waiting_[at].ranks;
  ranks.insert(std::upper_bound(ranks.begin(), ranks.end(), rank), rank);
  next_[rank] = shown_ + at + 1;
  while (!waiting_.empty() && (waiting_.front().ranks.size() == ranks_.size() || waiting_.size() > kMaxWaiting))
    show_first();
}

/// As early as the order of the rank's own lines allows, so that its next ones may still join those of others. It does
/// not hold up what waits behind it.
size_t LineFolder::insert(size_t at, std::string_view line, Clock::time_point now) {
  const auto until = at < waiting_.size() ? waiting_[at].until : now + kWindow;
  waiting_.insert(waiting_.begin() + static_cast<ptrdiff_t>(at), {std::string(line), {}, until});
  for (auto& [rank, next] : next_)
    if (next > shown_ + at) ++next;
  return at;
}

void LineFolder::release(Clock::time_point now) {
  while (!waiting_.empty() && (waiting_.front().until <= now || waiting_.front().ranks.size() == ranks_.size()))
    show_first();
}

void LineFolder::finish() {
  while (!waiting_.empty()) show_first();
}

std::optional<Clock::time_point> LineFolder::due() const {
  if (waiting_.empty()) return std::nullopt;
  return waiting_.front().until;
}

void LineFolder::show_first() {
  std::string line = "[";
  line.append(list_ranks(waiting_.front().ranks)).append("] ").append(waiting_.front().line);
  sink_.write(line);
  waiting_.pop_front();
  ++shown_;
}

}  // namespace lockstep
