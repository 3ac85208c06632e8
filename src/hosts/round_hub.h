#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/hub_frame.h"
#include "hosts/addresses.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {

/// The one writer of who takes part in the rounds of machines that train by themselves. It collects the pseudo-gradients
/// of a round, and sends all that came, or none, to every machine: so all machines step by the same ones. It computes
/// nothing.
///
/// A round closes when all machines that took part in the last one and are still there have contributed, or at its
/// deadline. A machine whose connection ends, or that is silent for kSilence, is not waited for. One that comes gets the
/// state of another after the next round, and contributes from then on, but is not waited for until it has.
class RoundHub {
 public:
  static constexpr std::chrono::milliseconds kSilence{800};

  struct Options {
    std::string key;
    int islands = 1;
    int least = 1;                                      ///< machines in a round, those that have finished included
    std::chrono::milliseconds patience{60000};          ///< at the start, for all machines
    std::optional<std::chrono::milliseconds> deadline;  ///< of a round, after the first contribution
    std::function<void(const std::string&)> tell;
    std::function<void(const std::string&)> record;  ///< takes a line of JSON for each round
  };

  RoundHub(const std::vector<std::string>& addresses, Options options);

  std::string endpoints() const;
  void watch(PollSet& polled);
  /// Everything that depends on time; to be called at least ten times a second.
  void tick();
  /// The machine will not come again.
  void give_up(int island) { gone_.insert(island); }
  /// Whether it has ever connected.
  bool has_come(int island) const { return came_.contains(island); }

 private:
  enum class Standing { kStranger, kWaiting, kGiving, kIn };
  struct Member {
    FileDescriptor socket;
    std::string in, out;
    size_t written = 0;
    Clock::time_point heard = Clock::now();
    Standing standing = Standing::kStranger;
    int island = -1;
    int64_t round = 0;
    bool contributed = false, takes_part = false;
    std::string bytes;
    std::string end;  ///< why the connection is over; empty: it is not
  };

  void accept_from(int listener);
  void read(Member& member);
  void write(Member& member);
  void handle(Member& member, hub::Kind kind, std::string_view body);
  void welcome(Member& member, std::string_view body);
  void receive(Member& member, std::string_view body);
  void hand_out(Member& from, std::string_view body);
  void send(Member& member, const std::string& frame);
  void drop_the_lost();
  void start_if_all_wait();
  void close_if_due();
  void close();
  void tell_changes(const std::set<int>& took_part);
  Member* first_in(Standing standing);

  const Options options_;
  std::vector<Listener> listeners_;
  std::list<Member> members_;
  int64_t round_ = 0;  ///< closed so far
  std::optional<uint64_t> model_;
  std::optional<uint64_t> outer_;  ///< a hash of the outer copy that the open round is about
  std::set<int> expected_, told_, finished_, gone_, came_;
  std::optional<Clock::time_point> first_waits_, first_contributed_;
  bool starts_ = false;  ///< the giver's state is that of a start
  int giver_ = -1;
  std::vector<std::pair<int64_t, std::string>> since_;  ///< results since a state was asked for
};

}  // namespace lockstep::hosts
