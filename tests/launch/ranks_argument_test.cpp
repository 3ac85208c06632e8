#include "launch/ranks_argument.h"

#include <gtest/gtest.h>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

TEST(RanksArgument, IsTakenOut) {
  for (const Words& words : {Words{"train", "--ranks", "3", "--lr", "1"}, {"train", "--lr", "1", "--ranks=3"}}) {
    const auto found = find_ranks_argument(words, 2);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->ranks, 3);
    EXPECT_EQ(found->arguments, (Words{"train", "--lr", "1"}));
  }
  EXPECT_EQ(find_ranks_argument({"train", "--ranks", "auto"}, 2)->ranks, 2);
}

TEST(RanksArgument, OthersAreLeftAlone) {
  for (const Words& words :
       {Words{}, {"train"}, {"--ranks"}, {"train", "--", "--ranks", "3"}, {"train", "--ranksome=3"}})
    EXPECT_FALSE(find_ranks_argument(words, 2)) << testing::PrintToString(words);
}

TEST(RanksArgument, IsRefusedWithItsName) {
  for (const Words& words : {Words{"t", "--ranks"},
                             {"t", "--ranks", "0"},
                             {"t", "--ranks="},
                             {"t", "--ranks", "-1"},
                             {"t", "--ranks", "2", "--ranks=2"}}) {
    try {
      find_ranks_argument(words, 2);
      ADD_FAILURE() << testing::PrintToString(words);
    } catch (const LaunchError& error) {
      EXPECT_EQ(error.exit_code, kExitBadCommandLine);
      EXPECT_EQ(std::string(error.what()).substr(0, 7), "--ranks");
    }
  }
}

}  // namespace
}  // namespace lockstep
