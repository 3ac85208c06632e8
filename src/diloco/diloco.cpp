#include <lockstep/diloco.h>

#include <exception>

#include <c10/util/Exception.h>

#include "base/state_in_use.h"
#include "diloco/rounds.h"

namespace lockstep {
namespace {

template <typename State>
State& living(const std::unique_ptr<State>& state) {
  TORCH_CHECK(state != nullptr, "this DiLoCo was moved from; use the object that it was moved to");
  return *state;
}

}  // namespace

DiLoCo::DiLoCo(Replica& model, const Group& group, DiLoCoOptions options)
    : state_(std::make_unique<State>(model, group, std::move(options))) {}
DiLoCo::DiLoCo(DiLoCo&&) noexcept = default;
DiLoCo::~DiLoCo() {
  note_gone(state_.get());
  // An exception on its way says why training ended.
  if (state_ == nullptr || std::uncaught_exceptions() > 0) return;
  try {
    state_->warn_unless_finished();
  } catch (const std::exception&) {  // NOLINT: from a handler of warnings
  }
}

bool DiLoCo::step() {
  const bool has_synchronised = living(state_).step();
  note_in_use({.object = state_.get(),
               .life = life_of_process(),
               .name = "a DiLoCo whose step() is called",
               .line = "checkpointer.add(\"diloco\", diloco)"});
  return has_synchronised;
}

void DiLoCo::synchronise() { living(state_).finish(/*leaves=*/false); }

void DiLoCo::finish() { living(state_).finish(/*leaves=*/true); }

DiLoCoStats DiLoCo::stats() const { return living(state_).stats; }

StateDict DiLoCo::state_dict() {
  note_kept(state_.get());
  return living(state_).state_dict();
}

void DiLoCo::load_state_dict(const StateDict& state) { living(state_).load_state_dict(state); }

void DiLoCo::load_from_ranks(const std::vector<StateDict>& ranks) { living(state_).load_from_ranks(ranks); }

bool DiLoCo::fits_ranks(const StateDict& state) const { return living(state_).fits_ranks(state); }

}  // namespace lockstep
