#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/group.h>

#include "diloco/hub_client.h"
#include "diloco/island_turns.h"

namespace lockstep::diloco {

/// A round as the hub has closed it.
struct IslandRound {
  int64_t number = 0;
  int giver = -1;                        ///< the island that is to give its state after this round; -1: none
  std::map<int, std::string_view> sent;  ///< by those that took part: all slices, one after the other, and more
};

/// This machine among others that come and go. Its first rank speaks with the hub; all ranks of the machine make all
/// calls, and get the same answers, errors included.
class Islands {
 public:
  /// Empty if the run was not started with --islands.
  /// Throws Error if this process has another one, since a machine has one place in the rounds.
  static std::unique_ptr<Islands> of_environment(const Group& here, const IslandTurns& turns);
  ~Islands();

  int island() const { return place_.island; }
  int count() const { return place_.islands; }
  bool is_in() const { return is_in_; }
  bool has_left() const { return has_left_; }
  /// Whether a wait for a result has ended because the run was asked to stop: then the machine stays out.
  bool is_asked_to_stop() const { return asked_to_stop_; }

  IslandTurns turns;

  /// The last pseudo-gradient of a fragment of this machine that an outer state has in it; zeros: it has none.
  struct Counted {
    int64_t step = 0, round = 0;
  };
  struct Joined {
    std::optional<std::string> state;  ///< of all slices, as put together by give(); empty: this machine's own counts
    int64_t round = 0;
    bool starts = true;              ///< all machines begin, or go on, together
    std::vector<Counted> counted{};  ///< by fragment
  };
  struct Contribution {
    int64_t round, step;
    bool takes_part;
    uint64_t outer;  ///< a hash of this rank's slice of the fragment's outer copy, which the hub compares
  };
  /// `round`: the last one that this machine's outer copy has.
  /// `model`: lines that must be the same on all machines.
  Joined join(int64_t round, const std::string& model);
  void give(int64_t round, const std::string& own_slice);
  /// The bytes of this rank's slice in a state.
  std::string slice_of(const std::string& state) const;

  struct Came {
    bool is_sent = false;             ///< the contribution: this machine was in time
    std::vector<IslandRound> rounds;  ///< whose results have come
  };
  /// Afterwards is_in() tells whether the machine is out, and has to join() again unless is_asked_to_stop(); the same
  /// holds for results(). `waits`: for the result, too. `text`: outlives what is returned.
  /// `more`: what the machine contributes besides its slices, of which only the first rank's counts.
  Came contribute(const Contribution& own, const std::string& own_slice, const std::string& more, bool waits,
                  std::string& text);
  /// The results that have come.
  std::vector<IslandRound> results(std::string& text);
  /// All results up to a round's, for which it waits.
  std::vector<IslandRound> results_until(int64_t round, std::string& text);
  /// Until the next join().
  void pause() { is_in_ = false; }
  void leave();
  /// On the first rank: "DiLoCo: machine 1" and `text`.
  void warn(const std::string& text) const;
  /// To be called in each step. Any rank may call it.
  void note_step() const {
    if (leads()) client_->note_step();
  }
  /// Tells the other machines why this one is about to end. Any rank may call it; the first one's text counts.
  void report(const std::string& problem) const {
    if (leads()) client_->report(problem);
  }

 private:
  Islands(HubPlace place, const Group& here, const IslandTurns& turns);
  bool leads() const { return client_ != nullptr; }
  /// On the first rank `speak`'s text, or the text of its Error; returned, or thrown, on all.
  template <typename Speak>
  std::string on_all(const Speak& speak) const;
  /// The results in a text from `begin` on; its first letter tells how this machine stands.
  std::vector<IslandRound> read(const std::string& text, size_t begin = 1);

  const Group here_;
  const HubPlace place_;
  std::unique_ptr<HubClient> client_;  ///< on the first rank
  bool is_in_ = false, has_left_ = false, asked_to_stop_ = false;
};

/// Whether island_shard() has been called in this process.
bool has_asked_for_island_shard();

}  // namespace lockstep::diloco
