#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "diloco/hub_client.h"
#include "diloco/machines.h"
#include "diloco/outer_fragment.h"

namespace lockstep::diloco {

/// A round as the hub has closed it.
struct IslandRound {
  int64_t number = 0;
  int giver = -1;                       ///< the island that is to give its state after this round; -1: none
  std::map<int, std::string_view> sent;  ///< by those that took part: all slices, one after the other
};

/// This machine among others that come and go. Its first rank speaks with the hub; all ranks of the machine make all
/// calls, and get the same answers.
class Islands {
 public:
  /// Empty if the run was not started with --islands.
  static std::unique_ptr<Islands> of_environment(const Group& here);

  int island() const { return place_.island; }
  int count() const { return place_.islands; }
  bool is_in() const { return is_in_; }

  struct Joined {
    std::optional<std::string> state;  ///< of all slices, as put together by give(); empty: this machine's own counts
    int64_t round = 0;
    bool starts = true;  ///< all machines begin, or go on, together
  };
  Joined join(int64_t steps, uint64_t model);
  void give(int64_t round, const std::string& own_slice);
  /// The bytes of this rank's slice in a state.
  std::string slice_of(const std::string& state) const;

  /// Results that this machine has missed, or else that of `round`, to which it contributes. Empty: the machine is out,
  /// and has to join() again. `text`: outlives the result.
  /// `outer`: a hash of this rank's slice of the outer copy, which the hub compares.
  std::vector<IslandRound> contribute(int64_t round, bool takes_part, uint64_t outer, const std::string& own_slice,
                                      std::string& text);
  void leave();

 private:
  Islands(HubPlace place, const Group& here);
  bool leads() const { return client_ != nullptr; }

  const Group here_;
  const HubPlace place_;
  std::unique_ptr<HubClient> client_;  ///< on the first rank
  bool is_in_ = false;
};

}  // namespace lockstep::diloco
