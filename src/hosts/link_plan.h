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

/// How a run encrypts what ranks send to other machines.
struct Encryption {
  bool is_on = false;
  int port = 0;       ///< of the links, on every machine; 0: any
  std::string relay;  ///< the machine by which those send that cannot connect to each other; empty: none
};

/// The encrypted links of a start, as one machine sees them.
struct LinkPlan {
  uint32_t first_address = 0;  ///< of LinkAddresses
  int machine = 0;             ///< this one
  std::vector<LinkPeer> machines;
  uint32_t start = 0;  ///< counts the starts of the run
  int relay = -1;      ///< the machine that joins connections of those that cannot connect to each other; -1: none
  void fields(auto& wire) { wire(first_address), wire(machine), wire(machines), wire(start), wire(relay); }
};

/// What a machine has told about itself.
struct LinkMachine {
  LinkPeer peer;
  std::string network;  ///< Ready::network
};

/// The links of machine `own`, or none if all machines are in one network namespace: then ranks meet on 127.0.0.1.
/// Throws LaunchError if only some are, since a loopback address cannot stand for both.
LinkPlan plan_links(const std::vector<LinkMachine>& machines, int own, const std::string& run_id);

/// The number of the machine `name`, or -1 if it is empty. Throws LaunchError if it is none of the machines, or
/// several.
int relay_among(const std::vector<LinkMachine>& machines, const std::string& name);

/// Identifies this process's network namespace among all machines.
std::string own_network();

}  // namespace lockstep::hosts
