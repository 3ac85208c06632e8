#include <lockstep/diloco.h>

#include "diloco/rounds.h"

namespace lockstep {

DiLoCo::DiLoCo(Replica& model, const Group& group, DiLoCoOptions options)
    : state_(std::make_unique<State>(model, group, std::move(options))) {}
DiLoCo::DiLoCo(DiLoCo&&) noexcept = default;
DiLoCo::~DiLoCo() = default;

bool DiLoCo::step() { return state_->step(); }

void DiLoCo::finish() { state_->finish(); }

DiLoCoStats DiLoCo::stats() const { return state_->stats; }

StateDict DiLoCo::state_dict() { return state_->state_dict(); }

void DiLoCo::load_state_dict(const StateDict& state) { state_->load_state_dict(state); }

void DiLoCo::load_from_ranks(const std::vector<StateDict>& ranks) { state_->load_from_ranks(ranks); }

}  // namespace lockstep
