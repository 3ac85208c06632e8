#include "doctor_hosts.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

// What `lockstep doctor --hosts` finds in measurements. tests/programs/lost_hosts_test.py takes them in real networks.

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Lines = std::vector<std::string>;

const Lines kNames = {"node1", "node2", "node3"};

Json link(int low, int high, double to_high = 125e6, double to_low = 125e6, double clock_ahead_s = 0) {
  return {{"low", low},
          {"high", high},
          {"round_trip_s", 1e-4},
          {"bytes_per_s_to_high", to_high},
          {"bytes_per_s_to_low", to_low},
          {"clock_ahead_s", clock_ahead_s}};
}

LinkFindings judge(const Json& links) { return judge_links(links.dump(), kNames); }

TEST(DoctorHosts, EqualLinksAreFine) {
  const LinkFindings found = judge({link(0, 1), link(0, 2, 100e6), link(1, 2, 125e6, 70e6, -0.4)});
  EXPECT_EQ(found.broken, Lines());
  EXPECT_EQ(found.slow, Lines());
}

TEST(DoctorHosts, ALinkThatIsSlowInOneDirectionIsNamed) {
  for (const Json& slow : {link(1, 2, 12.5e6, 125e6), link(1, 2, 125e6, 12.5e6)}) {
    const LinkFindings found = judge({link(0, 1), link(0, 2), slow});
    EXPECT_EQ(found.broken, Lines());
    EXPECT_EQ(found.slow,
              Lines{"node2 and node3 have a slow link: 100.0 Mbit/s, where the median of all links is 1.0 Gbit/s"});
  }
}

TEST(DoctorHosts, TheDirectionThatAFirewallStopsIsNamed) {
  Json blocked = link(0, 2);
  blocked["high_cannot_reach_low"] = "timed out (10.0.0.1:4711)";
  const Lines expected = {
      "node3 cannot connect to node1: timed out (10.0.0.1:4711); allow TCP connections between them in their "
      "firewalls, on all ports, or run with --encrypt --relay node2, to which all others can connect"};
  EXPECT_EQ(judge({link(0, 1), blocked, link(1, 2)}).broken, expected);
  Json all = {link(0, 1), blocked, link(1, 2)};
  for (const size_t i : {size_t{0}, size_t{2}})
    all[i]["high_cannot_reach_low"] = all[i]["low_cannot_reach_high"] = "timed out";
  for (const std::string& finding : judge(all).broken)
    EXPECT_EQ(finding.find("--relay"), std::string::npos) << "nobody reaches all: " << finding;
  // One that nothing passes has no rate, which is no slow link besides.
  const Json dead = {
      {"low", 0}, {"high", 2}, {"low_cannot_reach_high", "refused"}, {"high_cannot_reach_low", "refused"}};
  const LinkFindings found = judge({link(0, 1), dead, link(1, 2)});
  ASSERT_EQ(found.broken.size(), 2u);
  EXPECT_TRUE(found.broken[0].starts_with("node1 cannot connect to node3: refused; "));
  EXPECT_TRUE(found.broken[1].starts_with("node3 cannot connect to node1: refused; "));
  EXPECT_EQ(found.slow, Lines());
}

TEST(DoctorHosts, TheClockThatIsAheadIsNamed) {
  const char* advice = "'s, so times in their logs do not match; synchronise both by NTP";
  EXPECT_EQ(judge(Json::array({link(0, 1, 125e6, 125e6, 1.3)})).slow,
            Lines{std::string("node2 has a clock that is 1.3 s ahead of node1") + advice});
  EXPECT_EQ(judge(Json::array({link(0, 1, 125e6, 125e6, -90)})).slow,
            Lines{std::string("node1 has a clock that is 90.0 s ahead of node2") + advice});
}

TEST(DoctorHosts, ALinkThatBreaksIsSaid) {
  Json broke = link(0, 1, 0, 0);
  broke["broke"] = "the connection ended";
  EXPECT_EQ(judge(Json::array({broke})).broken,
            Lines{"node1 and node2 connect, but the link broke while it was measured: the connection ended"});
}

}  // namespace
}  // namespace lockstep
