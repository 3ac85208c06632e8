#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/hub_frame.h"
#include "hosts/channel.h"
#include "hosts/contributions.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {

/// The one writer of who takes part in the rounds of machines that train by themselves. It collects the
/// pseudo-gradients of a round, and sends all that came to every machine: so all machines step by the same ones. It
/// computes nothing.
///
/// Rounds close in the order of their numbers. One closes when all machines that took part in the last one and are
/// still there have contributed, or at its deadline. A machine whose channel ends, or that is silent for kLeftOutAfter,
/// is not waited for. One that comes gets the state of another after the next round, and contributes from then on, but
/// is not waited for until it has, or has come too late for a round: a machine that lives is waited for in the round
/// after that one.
class RoundHub {
 public:
  static constexpr std::chrono::milliseconds kLeftOutAfter{800};

  struct Options {
    int islands = 1;
    int least = 1;  ///< machines that must be there for a round to close, those that have finished included
    std::chrono::milliseconds patience{60000};          ///< at the start, for all machines
    std::optional<std::chrono::milliseconds> deadline;  ///< of a round, after the first contribution
    std::function<void(const std::string&)> tell;
    std::function<void(const std::string&)> record;          ///< takes a line of JSON for each round
    std::function<bool(int)> is_empty;                       ///< whether no machine has ever had the place; null: no
    std::function<void(int, int)> ended;                     ///< takes a machine and the exit code that its agent tells
    std::function<void(int, const std::string&)> problem{};  ///< takes a machine and why its program ends; empty: none
  };

  explicit RoundHub(Options options) : options_(std::move(options)) {}

  /// The channel of a machine's agent, in the place of an earlier one. `is_new`: nothing is held against the machine
  /// that an earlier one has done at its place.
  void admit(int island, std::unique_ptr<Channel> channel, bool is_new = false);
  void watch(PollSet& polled);
  /// Handles what has come, and everything that depends on time; to be called at least ten times a second.
  void tick(Clock::time_point now);
  /// The machine will not come again; `finished`: its program has ended in order.
  void give_up(int island, bool finished) { (finished ? known_.finished : known_.gone).insert(island); }
  bool is_connected(int island) const { return members_.contains(island); }
  size_t connected() const { return members_.size(); }
  /// Whether its program has ever asked to take part.
  bool has_come(int island) const { return known_.came.contains(island); }
  /// Whether the machine may not take part, and would be refused again.
  bool is_refused(int island) const { return known_.refused.contains(island); }
  /// Why the run cannot start: machines differ. Empty: nothing is wrong.
  const std::string& mismatch() const { return known_.mismatch; }
  /// To all agents.
  void send_to_all(Kind kind, const Over& over = {});

 private:
  enum class Standing { kHere, kWaiting, kGiving, kIn };
  struct Member {
    std::unique_ptr<Channel> channel;
    Standing standing = Standing::kHere;
    int64_t round = 0;
    std::optional<int> fragments;  ///< none: it has joined as a model in one
    std::string end;               ///< why the channel is over; empty: it is not
    void send(hub::Kind kind, std::string_view body = {}) { channel->send_bytes(static_cast<uint8_t>(kind), body); }
  };
  struct Known {
    std::set<int> finished, gone, came, refused;
    std::string mismatch;
    std::map<int, std::string> lost;  ///< why a machine is not in the rounds
    struct Model {
      uint64_t hash;
      int island;         ///< that came first
      std::string lines;  ///< the first ones of what all must have
    };
    std::optional<Model> model;
  };
  struct Giver {
    int island = -1;                                     ///< -1: nobody has been asked
    bool starts = false;                                 ///< its state is that of a start
    std::vector<std::pair<int64_t, std::string>> since;  ///< results since it was asked
  };

  void handle(int island, Member& member, hub::Kind kind, std::string_view body);
  void join(int island, Member& member, std::string_view body);
  void receive(int island, Member& member, std::string_view body);
  void hand_out(int island, Member& from, std::string_view body);
  /// The machine is left out until it joins again.
  void leave_rounds(int island, Member& member, const std::string& why);
  void refuse(int island, Member& member, const std::string& why);
  void drop_the_lost(Clock::time_point now);
  void start_if_all_wait(Clock::time_point now);
  /// Refuses those that come when the others have finished.
  void refuse_the_late();
  /// Closes the next round, and returns true, if it is to be.
  bool close_if_due(Clock::time_point now);
  void close(Clock::time_point now);
  void choose_giver(const std::set<int>& from);
  void record(const std::set<int>& took_part, const OpenRounds::Round& round, uint64_t outer, Clock::time_point now);
  int count(Standing standing) const;

  const Options options_;
  std::map<int, Member> members_;  // by island: results have this order, in which all machines add them up
  int64_t round_ = 0;              // closed so far
  Known known_;
  CountedSteps counted_;
  OpenRounds open_;
  Giver giver_;
  std::set<int> expected_;
  std::string told_;
  size_t largest_ = 0;  // bytes of a result or a state
  std::optional<Clock::time_point> first_waits_;
  Clock::time_point last_tick_ = Clock::now(), told_steps_{};
};

}  // namespace lockstep::hosts
