#include "collectives/shm/protocol/progress_engine.h"

#include <cstdio>

#include "collectives/shm/protocol/verdict.h"

namespace lockstep::shm {

bool ProgressEngine::advance() {
  for (;;) {
    blocked_on_ = blocked_on_any_ = 0;
    if (!pipeline_.step(blocked_on_)) break;
    sleepers_.wake();
  }
  if (const size_t messages = channels_.pending(); messages != 0) {
    channels_.progress(blocked_on_, blocked_on_any_);
    if (channels_.pending() < messages) sleepers_.wake();
  }
  if (is_idle()) return false;
  return !is_over();
}

bool ProgressEngine::is_over() {
  if (!Verdict::exists(world_)) return false;
  if (verdict_text_.empty()) {
    const Verdict verdict = Verdict::current(world_);
    verdict_text_ = verdict.text(world_);
    verdict.note(world_, verdict_text_);
  }
  fail_all(verdict_text_);
  return true;
}

void ProgressEngine::fail_all(const std::string& why) {
  if (pipeline_.has_background() && failure_.empty()) failure_ = why;
  pipeline_.fail_all(why);
  channels_.fail_all(why);
}

void ProgressEngine::abort(const std::string& why) {
  if (admission_.has_left() || is_over()) return;  // a verdict must not change what an earlier one refers to
  char* text = world_.mine().abort_text;
  text[why.copy(text, sizeof world_.mine().abort_text - 1)] = '\0';
  Verdict{Verdict::Cause::kAborted, world_.rank(), world_.rank(), pipeline_.started()}.declare(world_);
  advance();
}

void ProgressEngine::abort_operation(const Operation& operation, const char* why) {
  // Nothing here allocates, since the process may be out of memory. The other ranks cannot go on without the operation.
  pipeline_.remove(operation);
  std::snprintf(world_.mine().abort_text, sizeof world_.mine().abort_text, "operation %llu could not continue: %s",
                static_cast<unsigned long long>(operation.sequence), why);
  Verdict{Verdict::Cause::kAborted, world_.rank(), world_.rank(), operation.sequence}.declare(world_);
  sleepers_.wake();
}

void ProgressEngine::leave() {
  fail_all("this rank left the group while the operation was pending");
  world_.mine().closed.store(1 + pipeline_.started());
  world_.notify_all();
  sleepers_.wake();
}

}  // namespace lockstep::shm
