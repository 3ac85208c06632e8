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

/// How often the coordinator is told of pages that have changed.
constexpr std::chrono::milliseconds kTellEvery(100);

/// The ranks of one start on an agent's machine, and what the coordinator is told of them: output and ends at once,
/// pages and what was seen of the processes from time to time. Passive, as a Team.
class ReportedTeam {
 public:
  /// Starts the ranks and tells their pids. `address`: of this machine. `channel` outlives the object. Throws
  /// LaunchError.
  ReportedTeam(Channel& channel, const TeamSetup& setup, const Start& order, const std::string& address);

  void watch(PollSet& polled);
  /// When tell() has something to do again.
  Clock::time_point due() const { return tell_at_; }
  /// Tells the coordinator what has happened.
  void tell();
  /// Carries out what the coordinator says to ranks that run. Throws ProtocolError for any other message.
  void take(const Channel::Message& message);
  /// Kills what the ranks left behind, tells the rest, and waits until nothing is left.
  void finish();
  /// What is known of the ranks here.
  std::vector<RankView> views() { return team_.observe(false, false).ranks; }
  /// The coordinator is gone: kills the ranks, and waits until nothing is left.
  void end();

 private:
  MachineShare share_of(const Start& order, const std::string& address);
  void tell_pages();
  void tell_seen(const Look& look);
  void tell_ends();

  Channel& channel_;
  StoreRelay relay_;
  size_t untaken_ = 0;                // bytes of output on their way that the coordinator has not taken yet
  std::map<int, std::string> pages_;  // as they were told last, by rank
  bool stop_told_ = false;
  Clock::time_point tell_at_ = Clock::now(), seen_at_ = tell_at_;
  LocalTeam team_;  // last: it uses all the others
};

}  // namespace lockstep::hosts
