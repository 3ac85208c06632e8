#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "hosts/channel.h"
#include "hosts/store_relay.h"
#include "launch/poll_set.h"
#include "launch/process/local_team.h"

namespace lockstep::hosts {

/// The interval at which changed pages are reported to the coordinator.
constexpr std::chrono::milliseconds kTellEvery(100);

/// The ranks of one start on an agent's machine, and the reports about them to the coordinator: output and ends at
/// once, pages and observations of the processes from time to time. Passive, like a Team.
class ReportedTeam {
 public:
  /// Starts the ranks and reports their pids. `address` is this machine's. Throws LaunchError.
  /// REQUIRES: `channel` outlives the object.
  ReportedTeam(Channel& channel, const TeamSetup& setup, const Start& order, const std::string& address);

  void watch(PollSet& polled);
  Clock::time_point due() const { return tell_at_; }
  /// Reports events to the coordinator.
  void tell();
  /// Carries out the coordinator's orders to running ranks. Throws ProtocolError for any other message.
  void take(const Channel::Message& message);
  /// Kills the ranks' leftovers, reports the rest, and waits until no process is left.
  void finish();
  /// The present knowledge about the ranks here.
  std::vector<RankView> views() { return team_.observe(false, false).ranks; }
  /// Called when the coordinator is gone: kills the ranks, and waits until no process is left.
  void end();

 private:
  MachineShare share_of(const Start& order, const std::string& address);
  void tell_pages();
  void tell_seen(const Look& look);
  void tell_ends();

  Channel& channel_;
  StoreRelay relay_;
  size_t untaken_ = 0;                // bytes of output sent that the coordinator has not taken yet
  std::map<int, std::string> pages_;  // as last reported, by rank
  bool stop_told_ = false;
  Clock::time_point tell_at_ = Clock::now(), seen_at_ = tell_at_;
  LocalTeam team_;  // last: it uses all the others
};

}  // namespace lockstep::hosts
