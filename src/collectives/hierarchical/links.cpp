#include "collectives/hierarchical/links.h"

#include <utility>

#include <ATen/ATen.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/interruption.h"
#include "collectives/cause.h"
#include "rank_page/rank_board.h"

namespace lockstep::hierarchical_engine {
namespace {

at::Tensor bytes_at(const void* data, size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

/// Returns the result of `start`. A connection that broke before is reported as in a wait.
template <typename Start>
Transfer started(const char* what, int peer, bool is_sent, const Start& start) {
  try {
    return {start(), peer, is_sent};
  } catch (const std::exception& cause) {
    throw BrokenLink(what + std::to_string(peer) + " failed: " + cause_of(cause));
  }
}

constexpr const char* kSending = "sending to rank ";
constexpr const char* kReceiving = "receiving from rank ";

/// c10d's tags are not negative.
int tag_of(uint32_t tag) { return static_cast<int>(tag & 0x7fffffff); }

}  // namespace

Transfer Links::send(const void* data, size_t bytes, int to, uint32_t tag) {
  return started(kSending, to, true, [&] { return carrier_->send(bytes_at(data, bytes), to, tag_of(tag)); });
}

Transfer Links::receive(void* data, size_t bytes, int from, uint32_t tag) {
  return started(kReceiving, from, false, [&] { return carrier_->receive(bytes_at(data, bytes), from, tag_of(tag)); });
}

void Links::finish(Transfer& transfer, std::chrono::milliseconds timeout) {
  {
    const MutexLock lock(mutex_);
    if (interrupted_) throw BrokenLink("the wait was interrupted");
    awaited_ = transfer.work;
  }
  std::string failure;
  bool done = false;
  const auto start = Clock::now();
  try {
    check_for_interruption();  // also installs ours in front of a handler that the program has set since
    while (!done) {
      done = transfer.work->wait(timeout - std::chrono::floor<std::chrono::milliseconds>(Clock::now() - start));
      if (!done && !was_only_asked()) break;
    }
  } catch (const Interruption&) {
    const MutexLock lock(mutex_);
    awaited_ = nullptr;
    throw;
  } catch (const std::exception& cause) {
    failure = cause_of(cause);
  }
  const MutexLock lock(mutex_);
  awaited_ = nullptr;
  if (done) return own_page().beat();
  const char* what = transfer.is_sent ? kSending : kReceiving;
  throw BrokenLink(what + std::to_string(transfer.peer) + " failed: " + (failure.empty() ? "interrupted" : failure));
}

bool Links::was_only_asked() {
  {
    const MutexLock lock(mutex_);
    if (interrupted_ || !std::exchange(asked_, false)) return false;
  }
  check_for_interruption();
  return true;
}

void Links::ask() {
  const MutexLock lock(mutex_);
  if (!awaited_) return;
  asked_ = true;
  awaited_->abort();
}

void Links::interrupt() {
  const MutexLock lock(mutex_);
  interrupted_ = true;
  if (awaited_) awaited_->abort();
}

}  // namespace lockstep::hierarchical_engine
