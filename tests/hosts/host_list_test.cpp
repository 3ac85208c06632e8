#include "hosts/host_list.h"

#include <gtest/gtest.h>

#include <fstream>

#include "hosts/addresses.h"
#include "hosts/launch_command.h"
#include "launch/launch_error.h"
#include "support/temporary_folder.h"

namespace lockstep::hosts {
namespace {

using Words = std::vector<std::string>;

TEST(HostList, NamesAndNumbers) {
  EXPECT_EQ(parse_hosts("node1:4,node2", 2), (std::vector<Host>{{"node1", 4}, {"node2", 2}}));
  EXPECT_EQ(parse_hosts("::1,[fd00::2]:3,10.0.0.1:1", 1),
            (std::vector<Host>{{"::1", 1}, {"fd00::2", 3}, {"10.0.0.1", 1}}));
  for (const char* bad : {"", ",", "a,,b", "a:0", "a:x", "a:1,a:2", "-oProxyCommand=x", "a b"})
    EXPECT_THROW(parse_hosts(bad, 1), LaunchError) << bad;
}

TEST(HostList, AHostfileIsMpirunsAndItsErrorsNameTheLine) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "hosts";
  std::ofstream(path) << "# two machines\nnode1 slots=4 max_slots=8\n\nnode2   # one rank\n";
  EXPECT_EQ(read_hostfile(path, 1), (std::vector<Host>{{"node1", 4}, {"node2", 1}}));
  std::ofstream(path) << "node1\nnode2 cores=4\n";
  try {
    read_hostfile(path, 1);
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.what(), path + " line 2: 'cores=4' is not supported; a line must be like `node1 slots=4`");
  }
  EXPECT_THROW(read_hostfile("/nowhere", 1), LaunchError);
  std::ofstream(path) << "node2\nnode1\nnode2\nnode2\n";
  EXPECT_EQ(read_hostfile(path, 1), (std::vector<Host>{{"node2", 3}, {"node1", 1}})) << "PBS and LSF: a line a rank";
  EXPECT_EQ(read_hostfile(path, 2), (std::vector<Host>{{"node2", 6}, {"node1", 2}}));
  for (const char* twice : {"node1 slots=2\nnode1 slots=2\n", "node1\nnode1 slots=2\n", "node1 slots=2\nnode1\n"}) {
    std::ofstream(path) << twice;
    EXPECT_THROW(read_hostfile(path, 1), LaunchError) << twice;
  }
}

TEST(HostList, SlurmsLists) {
  EXPECT_EQ(parse_slurm_nodes("node1"), Words{"node1"});
  EXPECT_EQ(parse_slurm_nodes("node[08-10,12],login"), (Words{"node08", "node09", "node10", "node12", "login"}));
  EXPECT_EQ(parse_slurm_nodes("a[1-2]-ib,b"), (Words{"a1-ib", "a2-ib", "b"}));
  for (const char* bad : {"", "node[1-2", "node[2-1]", "node[x]", "node[1-16777216]"})
    EXPECT_THROW(parse_slurm_nodes(bad), LaunchError) << bad;
}

TEST(LaunchCommand, WordsAreSplitAndTheHostIsFilledIn) {
  const Words agent = {"/opt/lock step/bin/lockstep", "agent"};
  EXPECT_EQ(launch_words("ip netns exec {host}", "n1", agent),
            (Words{"ip", "netns", "exec", "n1", "/opt/lock step/bin/lockstep", "agent"}));
  EXPECT_EQ(launch_words("kubectl exec 'my pod-{host}' --", "n1", {"x"}),
            (Words{"kubectl", "exec", "my pod-n1", "--", "x"}));
  EXPECT_EQ(launch_words("/usr/bin/ssh {host}", "n1", agent),
            (Words{"/usr/bin/ssh", "n1", "'/opt/lock step/bin/lockstep'", "agent"}))
      << "a shell on the other side splits them again";
  EXPECT_THROW(launch_words("", "n1", agent), LaunchError);
  EXPECT_THROW(launch_words("ssh 'x", "n1", agent), LaunchError);
}

TEST(Addresses, EndpointsAndInterfaces) {
  EXPECT_EQ(parse_endpoint("--rendezvous", "[fd00::1]:29400"), (Endpoint{"fd00::1", 29400}));
  EXPECT_EQ(parse_endpoint("--rendezvous", "node1:1").text(), "node1:1");
  for (const char* bad : {"node1", "node1:", ":1", "node1:0", "node1:70000"})
    EXPECT_THROW(parse_endpoint("--rendezvous", bad), LaunchError) << bad;
  EXPECT_EQ(address_on("lo"), "127.0.0.1");
  EXPECT_EQ(address_on("127.0.0.0/8"), "127.0.0.1");
  EXPECT_THROW(address_on("10.255.255.0/30"), LaunchError);
  EXPECT_EQ(addresses_towards({"127.0.0.1"}), Words{"127.0.0.1"});
  EXPECT_FALSE(addresses_towards({"no.such.host.invalid"}).empty()) << "a container's name means nothing here";
}

TEST(Addresses, ARendezvousIsOnThisMachine) {
  EXPECT_EQ(addresses_of_rendezvous("127.0.0.1"), Words{"127.0.0.1"});
  const Words own = own_addresses();
  if (!own.empty()) {
    EXPECT_EQ(addresses_of_rendezvous(own.front()), Words{own.front()});
  }
  const auto refusal = [](const std::string& host) {
    try {
      addresses_of_rendezvous(host);
    } catch (const LaunchError& error) {
      EXPECT_EQ(error.exit_code, kExitNotStarted);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal("192.0.2.1"),
            "--rendezvous: 192.0.2.1 (192.0.2.1) is not an address of this machine, which has --node-rank 0; name this "
            "machine");
  EXPECT_EQ(refusal("no.such.host.invalid"),
            "--rendezvous: the host name `no.such.host.invalid` cannot be resolved on this machine");
}

TEST(Addresses, APortThatIsTakenIsNamed) {
  const Listener first = listen_on("127.0.0.1", 0);
  try {
    listen_on("127.0.0.1", first.endpoint.port);
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code, kExitNotStarted);
    EXPECT_NE(std::string(error.what()).find("the port is taken by another program, or by another run"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace lockstep::hosts
