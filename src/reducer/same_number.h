#pragma once

#include <string>

namespace lockstep {

/// The end of messages about ranks that did something a different number of times. `joining`: within join().
inline std::string advice_on_numbers(bool joining) {
  return std::string(joining ? "within join(), let the body end when a rank's batches do, and make the other "
                               "collective calls of the loop in JoinOptions::shadow, too"
                             : "if ranks have different numbers of batches, run the loop within join()") +
         "; if a rank decides by its own loss, decide by group.mean(loss), which is the same on all ranks";
}

}  // namespace lockstep
