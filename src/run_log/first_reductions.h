#pragma once

#include <lockstep/observer.h>

#include <memory>
#include <utility>

namespace lockstep {

/// Passes on the spans of the first reductions and then releases the observer, which closes its file. A reduction
/// begins with the span "backward".
class FirstReductions : public Observer {
 public:
  FirstReductions(std::shared_ptr<Observer> observer, int skipped, int passed_on)
      : observer_(std::move(observer)), skipped_(skipped), last_(skipped + passed_on) {}

  void span(const Span& span) override {
    if (span.name == "backward") ++count_;
    if (count_ > last_) observer_.reset();
    if (observer_ && count_ > skipped_) observer_->span(span);
  }
  bool is_done() const { return !observer_; }

 private:
  std::shared_ptr<Observer> observer_;
  const int skipped_, last_;
  int count_ = 0;
};

}  // namespace lockstep
