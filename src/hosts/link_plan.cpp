#include "hosts/link_plan.h"

#include <sys/stat.h>

#include <map>

#include "base/machine_name.h"
#include "hosts/link_address.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {

LinkPlan plan_links(const std::vector<LinkMachine>& machines, int own, const std::string& run_id) {
  std::map<std::string, std::string> names;  // of the first machine in a network
  std::string twice;
  for (const LinkMachine& machine : machines) {
    const auto [first, is_new] = names.emplace(machine.network, machine.peer.name);
    if (!is_new) twice = first->second + " and " + machine.peer.name;
  }
  if (names.size() == 1) return {};
  if (!twice.empty())
    throw LaunchError(kExitNotStarted,
                      twice + " are one machine; with --encrypt give each once, with the number of its ranks");
  LinkPlan plan;
  plan.first_address = LinkAddresses(run_id, static_cast<int>(machines.size())).first();
  plan.machine = own;
  for (const LinkMachine& machine : machines) plan.machines.push_back(machine.peer);
  return plan;
}

int relay_among(const std::vector<LinkMachine>& machines, const std::string& name) {
  if (name.empty()) return -1;
  std::string names;
  int found = -1;
  for (size_t i = 0; i < machines.size(); ++i) {
    names += (names.empty() ? "" : ", ") + machines[i].peer.name;
    if (machines[i].peer.name != name) continue;
    if (found >= 0)
      throw LaunchError(kExitNotStarted, "--relay " + name + " is the name of several machines, " +
                                             machines[found].peer.address + " and " + machines[i].peer.address +
                                             "; give them different host names");
    found = static_cast<int>(i);
  }
  if (found >= 0) return found;
  throw LaunchError(kExitNotStarted, "--relay " + name + " is none of the machines that have ranks: " + names);
}

std::string own_network() {
  struct stat status {};
  ::stat("/proc/self/ns/net", &status);
  return boot_id() + ":" + std::to_string(status.st_ino);
}

}  // namespace lockstep::hosts
