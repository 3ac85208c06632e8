#pragma once

// The end of messages about ranks that did something different numbers of times.
#define LOCKSTEP_WITHIN_JOIN                                                                                    \
  "run the loop within join(); where a rank decides by its own loss, decide by group.mean(loss), which is the " \
  "same on all ranks"
