#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "hosts/link_address.h"
#include "hosts/link_plan.h"
#include "hosts/link_sockets.h"

namespace lockstep::hosts {

/// The links of one start.
struct LinksOfAStart {
  LinkPlan plan;
  LinkAddresses addresses;
  OpenSockets sockets;
  /// By machine: it cannot be connected to, but by the relay.
  std::vector<std::atomic<bool>> is_relayed;
  /// Anybody on this machine can connect to its loopback ports: one such connection is told.
  std::atomic<bool> told_of_no_rank = false;

  explicit LinksOfAStart(const LinkPlan& from)
      : plan(from),
        addresses(from.first_address, static_cast<int>(from.machines.size())),
        is_relayed(from.machines.size()) {}
  /// Whether its data may go by the relay.
  bool may_relay(int machine) const { return plan.relay >= 0 && plan.relay != machine; }
  const LinkPeer* peer(int machine) const {
    return machine >= 0 && machine < addresses.machines() ? &plan.machines[static_cast<size_t>(machine)] : nullptr;
  }
  std::string own_name() const { return plan.machines[static_cast<size_t>(plan.machine)].name; }
};

}  // namespace lockstep::hosts
