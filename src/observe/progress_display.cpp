#include "observe/progress_display.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <utility>

namespace lockstep {
namespace {

constexpr int kDefaultColumns = 80;
constexpr int kPlainColumns = 120;
constexpr Clock::duration kLiveInterval = std::chrono::milliseconds(100);
constexpr Clock::duration kPlainInterval = std::chrono::seconds(10);

std::optional<int> columns_of(int fd) {
  if (::isatty(fd) == 0) return std::nullopt;
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kDefaultColumns;
}

/// A line that cannot be shown must not be a failure.
void write_all(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(fd, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;
    done += wrote;
  }
}

}  // namespace

ProgressOutput ProgressOutput::standard_error(const Environment& environment) {
  ProgressOutput output{.fd = STDERR_FILENO, .columns = columns_of(STDERR_FILENO)};
  if (output.columns || !environment.lockstep_terminal) return output;
  const std::string& text = *environment.lockstep_terminal;
  int columns = 0;
  std::from_chars(text.data(), text.data() + text.size(), columns);
  output.columns = columns > 0 ? columns : kDefaultColumns;
  return output;
}

ProgressDisplay::ProgressDisplay(ProgressLine::Pass pass, ProgressOutput output, Clock::time_point now)
    : output_(output),
      interval_(output.columns ? kLiveInterval : kPlainInterval),
      tracker_(std::move(pass), now),
      next_(now + interval_) {
  if (output_.columns) draw(tracker_.state(now), false);
}

ProgressDisplay::~ProgressDisplay() { finish(Clock::now()); }

void ProgressDisplay::step(int64_t samples, Clock::time_point now) {
  tracker_.step(samples);
  if (now < next_ || finished_) return;
  next_ = now + interval_;
  draw(tracker_.state(now), false);
}

void ProgressDisplay::finish(Clock::time_point now) {
  if (std::exchange(finished_, true)) return;
  if (output_.columns || tracker_.batches() > 0) draw(tracker_.final_state(now), true);
}

void ProgressDisplay::draw(const ProgressState& state, bool last) {
  std::string drawing;
  if (output_.columns) {
    // The terminal may have been resized. One column stays free, because some terminals wrap as soon as the last one is
    // written.
    const int columns = columns_of(output_.fd).value_or(*output_.columns);
    drawing += '\r';
    drawing += progress_text(state, columns - 1);
    drawing += "\x1b[K";
  } else {
    drawing = progress_text(state, kPlainColumns);
  }
  if (last || !output_.columns) drawing += '\n';
  write_all(output_.fd, drawing);
}

}  // namespace lockstep
