#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::hosts {

/// A machine at the other end of encrypted links.
struct LinkPeer {
  std::string name;
  std::string address;  ///< numeric
  int port = 0;
  void fields(auto& wire) { wire(name), wire(address), wire(port); }
};

/// The encrypted links of a start, as one machine sees them.
struct LinkPlan {
  uint32_t first_address = 0;  ///< of LinkAddresses
  int machine = 0;             ///< this one
  std::vector<LinkPeer> machines;
  uint32_t start = 0;  ///< counts the starts of the run
  void fields(auto& wire) { wire(first_address), wire(machine), wire(machines), wire(start); }
};

/// What a machine has told about itself.
struct LinkMachine {
  LinkPeer peer;
  std::string network;  ///< Ready::network
};

/// The links of machine `own`, or none if all machines are in one network namespace: then ranks meet on 127.0.0.1.
/// Throws LaunchError if only some are, since a loopback address cannot stand for both.
LinkPlan plan_links(const std::vector<LinkMachine>& machines, int own, const std::string& run_id);

/// Identifies this process's network namespace among all machines.
std::string own_network();

}  // namespace lockstep::hosts
