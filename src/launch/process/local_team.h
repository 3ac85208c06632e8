#pragma once

#include "launch/process/debugger.h"
#include "launch/process/team.h"
#include "rendezvous/key_value_server.h"

namespace lockstep {

/// This machine's share of a run on several machines. `count` 0: all ranks.
struct MachineShare {
  int first_rank = 0;
  int count = 0;
  int world_size = 0;
  int node = 0;
  int nodes = 1;
  std::string address;         ///< of this machine, for connections from the others
  std::string master_address;  ///< of rank 0's machine
  int terminal_rank = -1;      ///< the rank shown on a terminal of the launcher's machine; -1: none
  int terminal_columns = 0;
  /// The rank's end of a connection to the store of all ranks.
  std::function<FileDescriptor(int rank)> connect_to_store;
  /// Takes a rank's output, by the number of its stream; empty bytes mark the end of the stream.
  std::function<void(int rank, size_t stream, std::string_view bytes)> take_output;
  std::function<bool()> takes_output;  ///< whether take_output can take more now
};

/// Ranks in processes of this machine, with their key-value store unless they are a share of a larger run.
class LocalTeam final : public Team {
 public:
  /// Starts all ranks. Throws LaunchError if that fails.
  LocalTeam(const TeamSetup& setup, int restarts, MachineShare share = {});

  void watch(PollSet& polled) override;
  RanksObserved observe(bool process_states, bool processor_times) override;
  void ask_to_leave() override;
  void stop(int signal) override;
  void kill() override;
  void finish() override;
  void await_end() override;
  std::string host_of(int rank) const override;
  std::string error_text(int rank) const override;

  /// Null if none.
  const RankBoard* board() const { return board_ ? &*board_ : nullptr; }

 private:
  void start_rank(const TeamSetup& setup, int rank, int restarts);
  RankPlace place_of(const TeamSetup& setup, int rank, int restarts) const;
  void take_end(Rank& rank);
  MemoryKills memory_kills() const;
  void report_dropped_clients();
  void signal_running(int signal);

  const LaunchOptions& options_;
  const std::string folder_;
  const Guard& guard_;
  MachineShare share_;
  KeyValueServer store_;
  std::optional<LentTerminal> lent_terminal_;  // to the debugger
  MemoryKills before_;
};

}  // namespace lockstep
