#pragma once

#include <array>
#include <deque>
#include <utility>

#include "hosts/lobby.h"
#include "hosts/node.h"
#include "hosts/store_relay.h"
#include "launch/process/team.h"
#include "rendezvous/key_value_server.h"

namespace lockstep::hosts {

/// The ranks of one start on several machines, as reported by their agents. Their pages are copied to a board on this
/// machine, their output is shown and logged here, and their key-value store is served here.
class HostsTeam final : public Team {
 public:
  /// `nodes` are ready, and have been assigned their ranks.
  HostsTeam(std::deque<Node>& nodes, Lobby& lobby, int world_size, const TeamSetup& setup, int restarts,
            const Encryption& encryption);

  void watch(PollSet& polled) override;
  std::optional<Clock::time_point> due() const override;
  void tick() override;
  RanksObserved observe(bool process_states, bool processor_times) override;
  void ask_to_leave() override;
  void stop(int signal) override;
  void kill() override;
  void finish() override;
  void await_end() override {}
  std::string host_of(int rank) const override;
  std::string error_text(int rank) const override;

 private:
  /// An agent's report about one rank.
  struct Told {
    RankSeen seen;
    std::string error_text;
    std::array<std::string, 2> waiting;  ///< output for which there was no room
  };

  const Node& node_of(int rank) const;
  Node& node_of(int rank) { return const_cast<Node&>(std::as_const(*this).node_of(rank)); }
  void take_messages_of(Node& node);
  void take(Node& node, const Channel::Message& message);
  void take_output(Node& node, const Output& output);
  void take_pages(Node& node, const Pages& pages);
  void take_seen(Node& node, const Seen& seen);
  void take_end(Node& node, const Ended& ended);
  /// Forwards waiting output; `all`: even without room.
  void show(Node& node, int rank, bool all);
  void pass_on_output(Node& node);
  void lose(Node& node, const std::string& why);
  int wanted_ranks();
  void tell_all(Kind kind);

  std::deque<Node>& nodes_;
  Lobby& lobby_;
  KeyValueServer store_;
  StoreRelay relay_;
  std::vector<size_t> node_of_rank_;
  std::vector<Told> told_;  // by rank
  std::vector<bool> finished_;
  bool stop_asked_ = false;
  int refused_ = 0;  // the last impossible number of ranks reported to the user
  uint64_t stop_at_ = 0;
  std::vector<bool> looked_;  // nodes that have answered the last Look
  std::optional<Look> look_;  // in progress, or answered
  Clock::time_point ticked_ = Clock::now();
};

}  // namespace lockstep::hosts
