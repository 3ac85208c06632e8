#include "launch/ranks_argument.h"

#include <gtest/gtest.h>

#include "launch/launch_error.h"
#include "launch/plan.h"

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

TEST(RanksArgument, OptionsOfTheLauncherMayStandBesideIt) {
  for (const Words& words : {Words{"train", "--hang-timeout", "900", "--ranks", "3", "--grace=20", "--lr", "1"},
                             {"train", "--ranks=3", "--lr", "1", "--hang-timeout=900", "--grace", "20"}}) {
    const auto found = find_ranks_argument(words, 2);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->hang_timeout, std::chrono::seconds(900));
    EXPECT_EQ(found->grace, std::chrono::seconds(20));
    EXPECT_EQ(found->arguments, (Words{"train", "--lr", "1"}));
  }
  EXPECT_EQ(find_ranks_argument({"t", "--ranks=2", "--hang-timeout", "off"}, 2)->hang_timeout, kNever);
  EXPECT_FALSE(find_ranks_argument({"t", "--ranks=2"}, 2)->hang_timeout);
  EXPECT_EQ(find_ranks_argument({"t", "--ranks=2", "--", "--grace", "x"}, 2)->arguments,
            (Words{"t", "--", "--grace", "x"}));
}

TEST(RanksArgument, OthersAreLeftAlone) {
  for (const Words& words : {Words{},
                             {"train"},
                             {"--ranks"},
                             {"train", "--hang-timeout", "x"},
                             {"train", "--grace"},
                             {"train", "--", "--ranks", "3"},
                             {"train", "--ranksome=3"}})
    EXPECT_FALSE(find_ranks_argument(words, 2)) << testing::PrintToString(words);
}

TEST(RanksArgument, IsRefusedWithItsName) {
  for (const Words& words : {Words{"t", "--ranks"},
                             {"t", "--ranks", "0"},
                             {"t", "--ranks="},
                             {"t", "--ranks", "-1"},
                             {"t", "--ranks", "2", "--ranks=2"},
                             {"t", "--ranks", "2", "--hang-timeout", "soon"},
                             {"t", "--ranks", "2", "--grace"},
                             {"t", "--grace=1", "--ranks", "2", "--grace=1"}}) {
    try {
      find_ranks_argument(words, 2);
      ADD_FAILURE() << testing::PrintToString(words);
    } catch (const LaunchError& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.exit_code, kExitBadCommandLine);
      EXPECT_TRUE(text.starts_with("--ranks") || text.starts_with("--hang-timeout") || text.starts_with("--grace"))
          << text;
    }
  }
}

}  // namespace
}  // namespace lockstep
