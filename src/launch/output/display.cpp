#include "launch/output/display.h"

#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "base/rank_names.h"

namespace lockstep {

Display::Display(std::vector<int> shown_ranks) : shown_(std::move(shown_ranks)) {}

void Display::connect(int rank, RankOutput& output) {
  if (!std::binary_search(shown_.begin(), shown_.end(), rank)) return;
  auto& [out, err] = output.streams();
  out.sink = &out_;
  err.sink = &err_;
  if (shown_.size() == 1) return;
  out.merger = &merged_out_;
  err.merger = &merged_err_;
}

std::optional<int> Display::columns_for(int rank) const {
  if (shown_ != std::vector{rank} || !err_.is_terminal()) return std::nullopt;
  winsize size{};
  return ::ioctl(err_.fd(), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Display::print(const std::string& lines) {
  if (out_.is_terminal() && err_.is_terminal()) out_.start_line();
  err_.start_line();
  err_.write(lines);
}

std::optional<Clock::time_point> Display::due() const {
  std::optional<Clock::time_point> first;
  for (const auto& due : {out_.due(), err_.due(), merged_out_.due(), merged_err_.due()})
    if (due && (!first || *due < *first)) first = due;
  return first;
}

void Display::tick() {
  const auto now = Clock::now();
  for (LineMerger* merger : {&merged_out_, &merged_err_}) merger->release(now);
  for (Sink* sink : {&out_, &err_}) sink->check_patience(now);
}

void Display::finish() {
  for (LineMerger* merger : {&merged_out_, &merged_err_}) merger->finish();
}

bool Display::terminal_is_gone() const { return out_.terminal_is_gone() || err_.terminal_is_gone(); }

std::string Display::losses() const {
  const size_t bytes = out_.dropped_bytes() + err_.dropped_bytes();
  if (bytes == 0) return "";
  return std::to_string(bytes) + " bytes of the output of rank " + list_ranks(shown_) +
         " could not be shown, because nothing read them; the logs have them";
}

}  // namespace lockstep
