#include <lockstep/heartbeat.h>

#include "rank_page/rank_board.h"

namespace lockstep {

void heartbeat() { own_page().heartbeat(); }

}  // namespace lockstep
