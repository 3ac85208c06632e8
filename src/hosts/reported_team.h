#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "hosts/channel.h"
#include "hosts/link_process.h"
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
  /// Starts the ranks and reports their pids. `address` is this machine's. `links`: those to other machines; null:
  /// ranks connect directly. Throws LaunchError. REQUIRES: `channel` and `links` outlive the object.
  ReportedTeam(Channel& channel, const TeamSetup& setup, const Start& order, const std::string& address,
               LinkProcess* links);

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
  /// Opens the links to addresses that the store tells a rank.
  void open_links(const Store& store);
  void tell_pages();
  void tell_seen(const Look& look);
  void tell_ends();

  Channel& channel_;
  LinkProcess* const links_;
  LinkEndFinder ends_;
  StoreRelay relay_;
  size_t untaken_ = 0;                // bytes of output sent that the coordinator has not taken yet
  std::map<int, std::string> pages_;  // as last reported, by rank
  bool stop_told_ = false;
  Clock::time_point tell_at_ = Clock::now(), seen_at_ = tell_at_;
  LocalTeam team_;  // last: it uses all the others
};

}  // namespace lockstep::hosts
