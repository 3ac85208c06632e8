#pragma once

#include <memory>
#include <optional>
#include <string>

#include "hosts/channel.h"
#include "hosts/host_list.h"
#include "launch/output/line_splitter.h"
#include "launch/process/guard.h"
#include "launch/process/process.h"

namespace lockstep::hosts {

/// A machine of a run, as the coordinator sees it.
struct Node {
  int number = 0;
  Host host;
  std::unique_ptr<Channel> channel;  ///< null: its agent has not come, or was lost
  std::optional<Ready> ready;        ///< once it has said so
  std::string address;               ///< that it was told to use; empty: it chooses
  int first_rank = 0;

  // Of a run that is elastic.
  int most_slots = 0;   ///< ranks that it offered; host.slots are those that it has
  bool gone = false;    ///< it was lost, and is left out for good
  bool leaves = false;  ///< if the next start has fewer ranks, one of its places goes first

  // The command that started the agent; empty where that came by itself.
  std::optional<Process> process;
  const Guard* guard = nullptr;  ///< of that process
  std::optional<ProcessEnd> process_end;
  FileDescriptor output;  ///< of the command, both streams
  LineSplitter lines;
  Tail tail;

  bool is_ready() const { return channel && channel->is_open() && ready; }
  bool is_awaited() const { return !gone && !is_ready(); }
  /// Nothing is there, and nothing was started that may yet come.
  bool is_lost() const { return !gone && !(channel && channel->is_open()) && (!process || process_end); }
  bool has_ranks() const { return host.slots > 0; }
  bool has_rank(int rank) const { return rank >= first_rank && rank < first_rank + host.slots; }
  /// Lines that the command has printed since the last call.
  std::string read_output();
  /// Whether its agent runs on the coordinator's machine.
  bool is_here() const { return channel && channel->peer_address() == channel->local_address(); }
  /// Forgets the agent.
  void lose();
};

}  // namespace lockstep::hosts
