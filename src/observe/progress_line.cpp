#include <lockstep/progress.h>

#include <utility>

#include "base/environment.h"
#include "observe/progress_display.h"

namespace lockstep {

ProgressLine::ProgressLine() noexcept = default;
ProgressLine::ProgressLine(Pass pass) {
  if (pass.rank != 0) return;
  display_ = std::make_unique<ProgressDisplay>(
      std::move(pass), ProgressOutput::standard_error(Environment::from_process()), Clock::now());
}
ProgressLine::ProgressLine(ProgressLine&&) noexcept = default;
ProgressLine& ProgressLine::operator=(ProgressLine&&) noexcept = default;
ProgressLine::~ProgressLine() = default;

void ProgressLine::step(int64_t samples) {
  if (display_) display_->step(samples, Clock::now());
}

void ProgressLine::loss(double value) {
  if (display_) display_->tracker().loss(value);
}

void ProgressLine::communication(double total_seconds) {
  if (display_) display_->tracker().communication(total_seconds, Clock::now());
}

void ProgressLine::finish() {
  if (display_) display_->finish(Clock::now());
}

}  // namespace lockstep
