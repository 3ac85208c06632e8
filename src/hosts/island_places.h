#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

/// A place among the machines of a run of --islands.
struct IslandPlace {
  enum class Standing {
    kEmpty,     ///< no machine has had it
    kThere,     ///< its machine takes part, or is about to
    kAway,      ///< its machine is lost, and may come back by itself
    kGone,      ///< its machine does not come back by itself
    kFinished,  ///< its machine has finished
  };
  Standing standing = Standing::kEmpty;
  std::string name;  ///< of its machine
};

/// The place that a machine gets which joins, or why it gets none.
struct PlaceToJoin {
  int number = -1;
  std::string refusal;  ///< empty: it gets `number`
};

/// A machine gets its own place back, by its name; else an empty one, or one whose machine does not come back.
PlaceToJoin place_to_join(const std::string& name, const std::vector<IslandPlace>& places);

}  // namespace lockstep::hosts
