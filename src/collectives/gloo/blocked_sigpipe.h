#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace lockstep::gloo_engine {

/// Blocks SIGPIPE in this thread for its lifetime, and permanently in the threads started meanwhile. Gloo writes to
/// connections whose peer may be gone; the signal would end the process before the write could fail with EPIPE, which
/// becomes an Error. The program's own handling of the signal is unchanged.
class BlockedSigpipe {
 public:
  BlockedSigpipe() {
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~BlockedSigpipe() {
    const timespec at_once{};
    if (!was_pending_)
      while (::sigtimedwait(&sigpipe_, nullptr, &at_once) == SIGPIPE) continue;
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSigpipe(const BlockedSigpipe&) = delete;
  BlockedSigpipe& operator=(const BlockedSigpipe&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

}  // namespace lockstep::gloo_engine
