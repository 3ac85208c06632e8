#include "rank_page/stop_agreement.h"

#include <algorithm>

namespace lockstep {

bool StopAgreement::should_stop() {
  const uint64_t call = mine_.stop_calls().load(std::memory_order_relaxed) + 1;
  mine_.stop_calls().store(call);
  if (board_.head().stop_asked.load() == 0) return false;
  uint64_t stop_at = board_.head().stop_at.load();
  if (stop_at == 0) stop_at = decide();
  return call >= stop_at;
}

uint64_t StopAgreement::decide() {
  uint64_t furthest = 0;
  for (int rank = 0; rank < board_.world_size(); ++rank)
    furthest = std::max(furthest, board_.page(rank).stop_calls().load());
  uint64_t decided = 0;
  const uint64_t mine = furthest + 1;
  return board_.head().stop_at.compare_exchange_strong(decided, mine) ? mine : decided;
}

}  // namespace lockstep
