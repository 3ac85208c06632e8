#include "hosts/island_places.h"

#include <algorithm>

namespace lockstep::hosts {
namespace {

using Standing = IslandPlace::Standing;

constexpr size_t kMostNameBytes = 255;

template <typename Fits>
int first_place(const std::vector<IslandPlace>& places, const Fits& fits) {
  const auto found = std::find_if(places.begin(), places.end(), fits);
  return found == places.end() ? -1 : static_cast<int>(found - places.begin());
}

}  // namespace

PlaceToJoin place_to_join(const std::string& name, const std::vector<IslandPlace>& places) {
  if (name.empty() || name.size() > kMostNameBytes) return {-1, "its name has no or more than 255 characters"};
  const auto own = [&](const IslandPlace& one) { return one.standing != Standing::kEmpty && one.name == name; };
  const auto is_free = [](const IslandPlace& one) {
    return one.standing == Standing::kAway || one.standing == Standing::kGone;
  };
  if (const int number = first_place(places, [&](const IslandPlace& one) { return own(one) && is_free(one); });
      number >= 0)
    return {number, ""};
  if (const int number = first_place(places, own); number >= 0) {
    const bool finished = places[static_cast<size_t>(number)].standing == Standing::kFinished;
    return {-1, "machine " + std::to_string(number) + ", of the same name, " +
                    (finished ? "has finished" : "takes part already; give another one with --name")};
  }
  for (const Standing standing : {Standing::kEmpty, Standing::kGone})
    if (const int number = first_place(places, [&](const IslandPlace& one) { return one.standing == standing; });
        number >= 0)
      return {number, ""};
  return {-1, "all " + std::to_string(places.size()) +
                  " places of the run are taken; --elastic MIN:MAX sets how many there are"};
}

}  // namespace lockstep::hosts
