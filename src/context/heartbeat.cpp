#include <lockstep/convenience.h>

#include "base/rank_board.h"

namespace lockstep {

void heartbeat() { own_page().heartbeat(); }

}  // namespace lockstep
