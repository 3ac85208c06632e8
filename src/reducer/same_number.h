#pragma once

#include <string>

namespace lockstep {

/// The end of messages about ranks that did something a different number of times. `joining`: within join().
inline std::string advice_on_numbers(bool joining) {
  return std::string(joining ? "within join(), let the body end where a rank's batches do, and match in "
                               "JoinOptions::shadow what the others' loops call beside their backward"
                             : "where ranks have different numbers of batches, run the loop within join()") +
         "; where a rank decides by its own loss, decide by group.mean(loss), which is the same on all ranks";
}

}  // namespace lockstep
