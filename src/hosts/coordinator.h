#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hosts/host_list.h"
#include "hosts/lobby.h"
#include "hosts/node.h"
#include "launch/launch_error.h"
#include "launch/process/team.h"

namespace lockstep::hosts {

struct CoordinatorOptions {
  std::vector<Host> hosts;     ///< by number; of --nnodes only the first is known beforehand
  std::string launch_command;  ///< empty: the agents come by themselves
  std::optional<Endpoint> rendezvous;
  std::string interface;
  std::chrono::milliseconds patience{60000};  ///< for all agents to come
};

/// Starts a run's ranks on several machines: by agents, which it starts itself or awaits, over channels that both sides
/// have authenticated. Agents stay for the restarts of the run; those that were lost are started again, or left out.
class Coordinator final : public RankPlaces {
 public:
  /// `key`: of this run, or of the user.
  Coordinator(const CoordinatorOptions& options, const Key& key);
  ~Coordinator() override;

  std::unique_ptr<Team> start(const TeamSetup& setup, int restarts) override;
  void leave_out(int rank) override;
  std::string launch_command() const override { return options_.launch_command; }
  KeptState keep_state(const std::string& other_folder, bool is_sound) override;
  void end(int exit_code) override;

 private:
  bool comes_by_itself(const Node& node) const { return options_.rendezvous && node.number > 0; }
  /// Before a restart of an elastic run, with this number of ranks.
  void share_out(int ranks);
  void gather(const TeamSetup& setup);
  void open_door();
  void launch_agent(Node& node, const TeamSetup& setup);
  /// Waits for something to happen, and takes it.
  void turn(const TeamSetup& setup, Clock::time_point until);
  void admit(Arrival arrival, const TeamSetup& setup);
  /// Why the agent is not wanted; empty: it is.
  std::string objection(const Hello& hello, const std::string& command) const;
  void prepare(Node& node, const TeamSetup& setup) const;
  bool are_all_ready(const TeamSetup& setup);
  void take_replies(Node& node);
  void check_launched(Node& node) const;
  [[noreturn]] void throw_lost(Node& node, ExitCode code, const std::string& text) const;
  /// That all agents have the same program, and addresses that fit together.
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
