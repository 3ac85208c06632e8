#include "reducer/scaled_passes.h"

#include <atomic>

namespace lockstep {
namespace {

std::atomic<int> alive{0};

}  // namespace

ScaledPasses::ScaledPasses() { ++alive; }

ScaledPasses::~ScaledPasses() { --alive; }

bool ScaledPasses::any() { return alive.load(std::memory_order_relaxed) > 0; }

}  // namespace lockstep
