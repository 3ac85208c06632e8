#include "collectives/hierarchical/links.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "collectives/cause.h"
#include "rank_page/rank_board.h"

namespace lockstep::hierarchical_engine {
namespace {

at::Tensor bytes_at(const void* data, size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

/// c10d's tags are not negative.
int tag_of(uint32_t tag) { return static_cast<int>(tag & 0x7fffffff); }

}  // namespace

Transfer Links::send(const void* data, size_t bytes, int to, uint32_t tag) {
  return {carrier_->send(bytes_at(data, bytes), to, tag_of(tag)), to, true};
}

Transfer Links::receive(void* data, size_t bytes, int from, uint32_t tag) {
  return {carrier_->receive(bytes_at(data, bytes), from, tag_of(tag)), from, false};
}

void Links::finish(Transfer& transfer, std::chrono::milliseconds timeout) {
  {
    const MutexLock lock(mutex_);
    if (interrupted_) throw BrokenLink("the wait was interrupted");
    awaited_ = transfer.work;
  }
  std::string failure;
  bool done = false;
  try {
    done = transfer.work->wait(timeout);
  } catch (const std::exception& cause) {
    failure = cause_of(cause);
  }
  const MutexLock lock(mutex_);
  awaited_ = nullptr;
  if (done) return own_page().beat();
  const char* what = transfer.is_sent ? "sending to rank " : "receiving from rank ";
  throw BrokenLink(what + std::to_string(transfer.peer) + " failed: " + (failure.empty() ? "interrupted" : failure));
}

void Links::interrupt() {
  const MutexLock lock(mutex_);
  interrupted_ = true;
  if (awaited_) awaited_->abort();
}

}  // namespace lockstep::hierarchical_engine
