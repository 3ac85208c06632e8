#include "launch/option_values.h"

#include <gtest/gtest.h>

#include "launch/launch_error.h"
#include "launch/plan.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// The text of what `call` throws; empty if it throws nothing.
template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const LaunchError& error) {
    return error.exit_code == kExitBadCommandLine ? error.what() : "another code";
  }
  return "";
}

TEST(OptionValues, Seconds) {
  EXPECT_EQ(parse_seconds("--grace", "5", false), milliseconds(5000));
  EXPECT_EQ(parse_seconds("--grace", "0.25", false), milliseconds(250));
  EXPECT_EQ(parse_seconds("--grace", "604800", false), kNever);
  EXPECT_EQ(parse_seconds("--hang-timeout", "off", true), kNever);
  for (const char* bad : {"0", "-1", "", " 5", "5s", "inf", "nan", "1e99", "0.0001", "off"})
    EXPECT_EQ(refusal([&] { parse_seconds("--grace", bad, false); }),
              std::string("--grace takes a number of seconds from 0.001 to 604800; it got '") + bad + "'");
}

TEST(OptionValues, Numbers) {
  EXPECT_EQ(parse_number("--max-restarts", "0", 0, 9), 0);
  EXPECT_EQ(parse_number("--max-restarts", "9", 0, 9), 9);
  for (const char* bad : {"-1", "10", "", "1x", "99999999999", "1.0"})
    EXPECT_NE(refusal([&] { parse_number("--max-restarts", bad, 0, 9); }), "") << bad;
}

TEST(OptionValues, Ranks) {
  using Ranks = std::vector<int>;
  EXPECT_EQ(parse_ranks("--tee", "all", 3), (Ranks{0, 1, 2}));
  EXPECT_EQ(parse_ranks("--tee", "2,0", 3), (Ranks{0, 2}));
  EXPECT_EQ(parse_ranks("--tee", "1-2,2,0-1", 3), (Ranks{0, 1, 2}));
  for (const char* bad : {"", "3", "0,", ",0", "-1", "1-", "2-1", "0-3", "a", "all,0", "0 1"})
    EXPECT_NE(refusal([&] { parse_ranks("--tee", bad, 3); }), "") << bad;
  EXPECT_NE(refusal([&] { parse_ranks("--tee", "3", 2); }).find("from 0 to 1"), std::string::npos);
}

TEST(OptionValues, Variables) {
  EXPECT_EQ(refusal([] { check_variable("--env", "A=b=c"); }), "");
  EXPECT_EQ(refusal([] { check_variable("--env", "A="); }), "");
  for (const char* bad : {"", "A", "=b"}) EXPECT_NE(refusal([&] { check_variable("--env", bad); }), "") << bad;
  EXPECT_NE(refusal([] { check_variable("--env", "RANK=1"); }).find("RANK is set by the launcher"), std::string::npos);
  EXPECT_NE(
      refusal([] { check_variable("--env", "LOCKSTEP_ISLAND=0"); }).find("LOCKSTEP_ISLAND is set by the launcher"),
      std::string::npos);
}

}  // namespace
}  // namespace lockstep
