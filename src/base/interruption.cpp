#include "base/interruption.h"

#include <unistd.h>
#include <csignal>

#include <atomic>

// The program's own handler stays in effect: ours runs before it, and is reinstalled whenever the program has set
// another. Python's handler only records the signal; only its main thread, holding Python's lock, can then run the
// program's reaction. So a wait asks only after a signal, and never takes that lock otherwise.

namespace lockstep {
namespace {

std::atomic<void (*)()> the_check{nullptr};
std::atomic<bool> pending{false};
struct sigaction the_programs {};  // written while ours is not installed

void on_interrupt(int signal, siginfo_t* info, void* context) {
  pending.store(true);
  if ((the_programs.sa_flags & SA_SIGINFO) != 0)
    the_programs.sa_sigaction(signal, info, context);
  else
    the_programs.sa_handler(signal);
}

void go_before_the_programs_handler() {
  struct sigaction now {};
  if (::sigaction(SIGINT, nullptr, &now) != 0) return;
  const bool has_siginfo = (now.sa_flags & SA_SIGINFO) != 0;
  if (has_siginfo ? now.sa_sigaction == on_interrupt : now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN) return;
  the_programs = now;
  now.sa_flags |= SA_SIGINFO;
  now.sa_sigaction = on_interrupt;
  ::sigaction(SIGINT, &now, nullptr);
}

}  // namespace

void let_waits_be_interrupted(void (*check)()) {
  the_check.store(check);
  go_before_the_programs_handler();
}

bool can_be_interrupted() { return the_check.load(std::memory_order_relaxed) != nullptr && ::gettid() == ::getpid(); }

bool interruption_is_pending() { return pending.load(std::memory_order_relaxed); }

void check_for_interruption() {
  if (!can_be_interrupted()) return;
  go_before_the_programs_handler();
  if (pending.exchange(false)) the_check.load()();
}

}  // namespace lockstep
