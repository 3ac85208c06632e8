#include "hosts/island_places.h"

#include <gtest/gtest.h>

namespace lockstep::hosts {
namespace {

using Standing = IslandPlace::Standing;

/// "2", or why it gets none.
std::string place(const std::string& name, const std::vector<IslandPlace>& places) {
  const PlaceToJoin found = place_to_join(name, places);
  EXPECT_EQ(found.number < 0, !found.refusal.empty());
  return found.number < 0 ? found.refusal : std::to_string(found.number);
}

TEST(IslandPlaces, ANewMachineGetsAnEmptyPlaceBeforeOneThatWasLeft) {
  EXPECT_EQ(place("c", {{Standing::kThere, "a"}, {Standing::kGone, "b"}, {Standing::kEmpty, ""}}), "2");
  EXPECT_EQ(place("c", {{Standing::kThere, "a"}, {Standing::kGone, "b"}, {Standing::kThere, "d"}}), "1");
}

TEST(IslandPlaces, AMachineGetsItsOwnPlaceBack) {
  for (const Standing standing : {Standing::kAway, Standing::kGone})
    EXPECT_EQ(place("b", {{Standing::kThere, "a"}, {standing, "b"}, {Standing::kEmpty, ""}}), "1");
}

TEST(IslandPlaces, ANameTakesPartOnce) {
  EXPECT_EQ(place("a", {{Standing::kThere, "a"}, {Standing::kEmpty, ""}}),
            "machine 0, of the same name, takes part already; give another one with --name");
  EXPECT_EQ(place("a", {{Standing::kFinished, "a"}, {Standing::kEmpty, ""}}),
            "machine 0, of the same name, has finished");
}

TEST(IslandPlaces, AFullRunSaysHowManyItTakes) {
  const std::string full = "all 2 places of the run are taken; --elastic MIN:MAX sets how many there are";
  EXPECT_EQ(place("c", {{Standing::kThere, "a"}, {Standing::kThere, "b"}}), full);
  // Those come back by themselves, or have trained their part of the data.
  EXPECT_EQ(place("c", {{Standing::kAway, "a"}, {Standing::kFinished, "b"}}), full);
}

TEST(IslandPlaces, NamesHaveALength) {
  const std::vector<IslandPlace> empty = {{}};
  EXPECT_EQ(place("", empty), "its name has no or more than 255 characters");
  EXPECT_EQ(place(std::string(256, 'x'), empty), "its name has no or more than 255 characters");
  EXPECT_EQ(place(std::string(255, 'x'), empty), "0");
}

}  // namespace
}  // namespace lockstep::hosts
