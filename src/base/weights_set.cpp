#include "base/weights_set.h"

#include <atomic>

namespace lockstep {
namespace {

std::atomic<uint64_t> times{0};

}  // namespace

void note_weights_set() { times.fetch_add(1, std::memory_order_relaxed); }

uint64_t times_weights_were_set() { return times.load(std::memory_order_relaxed); }

}  // namespace lockstep
