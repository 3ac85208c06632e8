#pragma once

#include <memory>
#include <optional>
#include <string>

#include "hosts/agent_process.h"
#include "hosts/channel.h"
#include "hosts/host_list.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {

/// A machine of a run, as the coordinator sees it.
struct Node {
  int number = 0;
  Host host;
  std::unique_ptr<Channel> channel;  ///< null: its agent has not connected, or was lost
  std::optional<Ready> ready;
  std::string address;                    ///< assigned to it; empty: it chooses its own
  std::unique_ptr<AgentProcess> process;  ///< that started the agent; null if the agent connected by itself
  int first_rank = 0;

  // For an elastic run.
  int most_slots = 0;   ///< ranks that it offered; host.slots: ranks that it has
  bool gone = false;    ///< it was lost, and is left out permanently
  bool leaves = false;  ///< if the next start has fewer ranks, one of its places is dropped first

  bool is_ready() const { return channel && channel->is_open() && ready; }
  bool is_awaited() const { return !gone && !is_ready(); }
  /// Whether it has no agent, and none was started that may still connect.
  bool is_lost() const { return !gone && !(channel && channel->is_open()) && (!process || process->end()); }
  bool has_ranks() const { return host.slots > 0; }
  bool has_rank(int rank) const { return rank >= first_rank && rank < first_rank + host.slots; }
  /// Throws ProtocolError unless the rank is one of its own; returns its number.
  size_t require(int rank) const {
    if (!has_rank(rank)) throw ProtocolError("a message about rank " + std::to_string(rank) + ", which is not there");
    return static_cast<size_t>(rank);
  }
  /// Whether its agent runs on the coordinator's machine.
  bool is_here() const {
    if (!channel) return false;
    const auto ends = channel->addresses();
    return ends.here == ends.there;
  }
  /// Adds the agent's channel, if there is one.
  void watch(PollSet& polled) {
    if (channel) polled.add(channel->fd(), channel->events(), [this](const pollfd&) { channel->act(); });
  }
  /// Discards the agent.
  void lose() {
    channel.reset();
    ready.reset();
    address.clear();
    process.reset();
  }
};

}  // namespace lockstep::hosts
