#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hosts/host_list.h"
#include "hosts/link_plan.h"
#include "hosts/lobby.h"
#include "hosts/node.h"
#include "launch/launch_error.h"
#include "launch/process/team.h"

namespace lockstep::hosts {

struct CoordinatorOptions {
  std::vector<Host> hosts;     ///< by number; with --nnodes only the first is known beforehand
  std::string launch_command;  ///< empty: the agents connect by themselves
  std::optional<Endpoint> rendezvous;
  std::string interface;
  std::chrono::milliseconds patience{60000};  ///< for all agents to connect
  Encryption encryption;
};

/// Starts a run's ranks on several machines, by agents that it starts itself or awaits, over channels that both sides
/// have authenticated. Agents stay for the restarts of the run; lost ones are started again, or left out.
class Coordinator final : public RankPlaces {
 public:
  /// `key` is the run's, or the user's.
  Coordinator(const CoordinatorOptions& options, const Key& key);
  ~Coordinator() override;

  std::unique_ptr<Team> start(const TeamSetup& setup, int restarts) override;
  void leave_out(int rank) override;
  std::string launch_command() const override { return options_.launch_command; }
  KeptState keep_state(const std::string& other_folder, bool is_sound) override;
  void end(int exit_code) override;

 private:
  bool comes_by_itself(const Node& node) const { return options_.rendezvous && node.number > 0; }
  /// Called before a restart of an elastic run, with this number of ranks.
  void share_out(int ranks);
  void gather(const TeamSetup& setup);
  void open_door();
  void launch_agent(Node& node, const TeamSetup& setup);
  /// Waits for an event, and handles it.
  void turn(const TeamSetup& setup, Clock::time_point until);
  void admit(Arrival arrival, const TeamSetup& setup);
  /// The reason to refuse the agent; empty if it is welcome.
  std::string objection(const Hello& hello, const std::string& command) const;
  void prepare(Node& node, const TeamSetup& setup) const;
  bool are_all_ready(const TeamSetup& setup);
  void take_replies(Node& node);
  void check_launched(Node& node) const;
  [[noreturn]] void throw_lost(Node& node, ExitCode code, const std::string& text) const;
  /// Checks that all agents have the same program, and compatible addresses.
  void compare(const TeamSetup& setup) const;
  std::string missing() const;

  const CoordinatorOptions options_;
  const Tls tls_;
  Lobby lobby_;
  std::deque<Node> nodes_;
  bool shared_out_ = false;  ///< machines have the ranks of an earlier start
  bool over_ = false;
};

}  // namespace lockstep::hosts
