#include "context/process_role.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "base/environment.h"
#include "base/error.h"
#include "launch/process/own_program.h"
#include "rendezvous/world.h"

namespace lockstep {
namespace {

/// The process that has a Context; 0: none. Its forked children do not have one.
std::atomic<pid_t> holder{0};

}  // namespace

OnlyContext::OnlyContext() {
  if (holder.exchange(::getpid()) == ::getpid())
    throw Error(
        "this process already has a Context, and may have only one at a time; use that one, or let its scope end "
        "before you make another");
}

OnlyContext::OnlyContext(OnlyContext&& other) noexcept : holds_(std::exchange(other.holds_, false)) {}

OnlyContext::~OnlyContext() {
  pid_t own = ::getpid();
  if (holds_) holder.compare_exchange_strong(own, 0);
}

void start_ranks_if_asked(int argc, const char* const* argv) {
  const World world = discover_world(Environment::from_process());
  become_launcher_if_asked({argv, argv + argc}, world.source == World::Source::kAlone ? "" : name_of(world.source));
}

}  // namespace lockstep
