#include "context/only_context.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "base/error.h"

namespace lockstep {
namespace {

/// The process whose Context is there; 0: none. A child that it forks does not have it.
std::atomic<pid_t> holder{0};

}  // namespace

OnlyContext::OnlyContext() {
  if (holder.exchange(::getpid()) == ::getpid())
    throw Error(
        "this process has a Context already, and there can be one at a time; pass that one on, or let its scope end "
        "before you make another");
}

OnlyContext::OnlyContext(OnlyContext&& other) noexcept : holds_(std::exchange(other.holds_, false)) {}

OnlyContext::~OnlyContext() {
  pid_t own = ::getpid();
  if (holds_) holder.compare_exchange_strong(own, 0);
}

}  // namespace lockstep
