#include "hosts/link_address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include "hosts/link_plan.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

std::string bytes_of(const std::string& address, uint16_t port) {
  sockaddr_in end{};
  end.sin_family = AF_INET;
  end.sin_port = htons(port);
  ::inet_pton(AF_INET, address.c_str(), &end.sin_addr);
  return {reinterpret_cast<const char*>(&end), sizeof end};
}

TEST(LinkAddresses, AreLoopbackAndDifferByMachineAndRun) {
  const LinkAddresses one("run 1", 4096), other("run 2", 4096);
  EXPECT_TRUE(one.text_of(0).starts_with("127."));
  EXPECT_TRUE(one.text_of(4095).starts_with("127."));
  EXPECT_NE(one.text_of(0), one.text_of(1));
  EXPECT_NE(one.first(), other.first());
  EXPECT_EQ(LinkAddresses("run 1", 2).first(), one.first());
  EXPECT_NE(one.text_of(0), "127.0.0.1");
}

TEST(LinkEndFinder, FindsAddressesHoweverTheyArrive) {
  const LinkAddresses addresses("run", 3);
  const std::string text = "key=" + bytes_of(addresses.text_of(2), 40001) + "and" + bytes_of("127.0.0.1", 40002) +
                           bytes_of(addresses.text_of(0), 7) + bytes_of("10.0.0.2", 9);
  const std::vector<LinkEnd> expected{{2, 40001}, {0, 7}};
  EXPECT_EQ(LinkEndFinder(addresses).find(0, text), expected);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    LinkEndFinder finder(addresses);
    auto found = finder.find(5, text.substr(0, cut));
    EXPECT_TRUE(finder.find(6, text.substr(cut)).size() <= 2) << "another connection";
    for (const LinkEnd& end : finder.find(5, text.substr(cut))) found.push_back(end);
    EXPECT_EQ(found, expected) << cut;
  }
}

TEST(LinkEndFinder, FindsNothingElse) {
  const LinkAddresses addresses("run", 3);
  EXPECT_TRUE(LinkEndFinder(addresses).find(0, "").empty());
  EXPECT_TRUE(LinkEndFinder(addresses).find(0, bytes_of(addresses.text_of(3), 40001)).empty()) << "no such machine";
  EXPECT_TRUE(LinkEndFinder(addresses).find(0, bytes_of(addresses.text_of(1), 0)).empty()) << "no port";
  EXPECT_TRUE(LinkEndFinder(LinkAddresses()).find(0, bytes_of("127.93.1.1", 1)).empty()) << "no links";
}

TEST(LinkPlan, NamesEachMachineOnceOrNone) {
  const LinkMachine a{{"a", "10.0.0.1", 1}, "x"}, b{{"b", "10.0.0.2", 2}, "y"}, twin{{"twin", "10.0.0.1", 3}, "x"};
  const LinkPlan plan = plan_links({a, b}, 1, "run");
  ASSERT_EQ(plan.machines.size(), 2u);
  EXPECT_EQ(plan.machine, 1);
  EXPECT_EQ(plan.machines[1].name, "b");
  EXPECT_TRUE(plan_links({a, twin}, 0, "run").machines.empty()) << "nothing leaves the machine";
  try {
    plan_links({a, b, twin}, 0, "run");
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_STREQ(error.what(),
                 "a and twin are one machine; with --encrypt give each once, with the number of its ranks");
  }
  EXPECT_FALSE(own_network().empty());
}

TEST(LinkPlan, ARelayIsOneMachine) {
  const LinkMachine a{{"vm", "10.0.0.1", 1}, "x"}, b{{"b", "10.0.0.2", 2}, "y"}, c{{"vm", "10.0.0.3", 3}, "z"};
  EXPECT_EQ(relay_among({a, b, c}, ""), -1);
  EXPECT_EQ(relay_among({a, b, c}, "b"), 1);
  try {
    relay_among({a, b, c}, "vm");
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_STREQ(error.what(),
                 "--relay vm is the name of several machines, 10.0.0.1 and 10.0.0.3; give them different host names");
  }
}

}  // namespace
}  // namespace lockstep::hosts
