#include "launch/output/line_merger.h"

#include <algorithm>
#include <set>

#include "base/rank_names.h"

namespace lockstep {

LineMerger::LineMerger(Sink& sink, std::vector<int> ranks) : sink_(sink), ranks_(std::move(ranks)) {}

void LineMerger::add(int rank, std::string_view lines, Clock::time_point now) {
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size() - 1) + 1;
    add_line(rank, lines.substr(0, end), now);
    lines.remove_prefix(end);
  }
}

void LineMerger::add_line(int rank, std::string_view line, Clock::time_point now) {
  const size_t next = after_the_last_of(rank);
  size_t at = next;
  while (at < waiting_.size() && waiting_[at].line != line) ++at;
  if (at == waiting_.size()) at = move_behind(next, rank, line);
  if (at == waiting_.size()) {
    // As early as the order of the rank's own lines allows, without delaying lines that wait after it.
    const auto until = next < waiting_.size() ? waiting_[next].until : now + kWindow;
    waiting_.insert(waiting_.begin() + static_cast<ptrdiff_t>(next), {std::string(line), {}, until});
    at = next;
  }
  auto& ranks = waiting_[at].ranks;
  ranks.insert(std::upper_bound(ranks.begin(), ranks.end(), rank), rank);
  while (!waiting_.empty() && (waiting_.front().ranks.size() == ranks_.size() || waiting_.size() > kMaxWaiting))
    show_first();
}

size_t LineMerger::after_the_last_of(int rank) const {
  size_t next = waiting_.size();
  while (next > 0 && !waiting_[next - 1].has(rank)) --next;
  return next;
}

size_t LineMerger::move_behind(size_t next, int rank, std::string_view line) {
  for (size_t at = next; at-- > 0;) {
    if (waiting_[at].line != line || waiting_[at].has(rank)) continue;
    // The lines that must stay after this one: those that came after it from any of its ranks, and so on.
    std::set<int> ranks;
    std::vector<Waiting> before, behind;
    for (size_t i = at; i < next; ++i) {
      Waiting& each = waiting_[i];
      const bool follows = i == at || std::any_of(each.ranks.begin(), each.ranks.end(),
                                                  [&](int other) { return ranks.contains(other); });
      if (follows) ranks.insert(each.ranks.begin(), each.ranks.end());
      (follows ? behind : before).push_back(each);
    }
    if (ranks.contains(rank)) continue;
    const size_t moved_to = at + before.size();
    std::move(behind.begin(), behind.end(),
              std::move(before.begin(), before.end(), waiting_.begin() + static_cast<ptrdiff_t>(at)));
    for (size_t i = next; i-- > at + 1;) waiting_[i - 1].until = std::min(waiting_[i - 1].until, waiting_[i].until);
    return moved_to;
  }
  return waiting_.size();
}

void LineMerger::release(Clock::time_point now) {
  while (!waiting_.empty() && (waiting_.front().until <= now || waiting_.front().ranks.size() == ranks_.size()))
    show_first();
}

void LineMerger::finish() {
  while (!waiting_.empty()) show_first();
}

std::optional<Clock::time_point> LineMerger::due() const {
  if (waiting_.empty()) return std::nullopt;
  return waiting_.front().until;
}

void LineMerger::show_first() {
  std::string line = "[";
  line.append(list_ranks(waiting_.front().ranks)).append("] ").append(waiting_.front().line);
  sink_.write(line);
  waiting_.pop_front();
}

}  // namespace lockstep
