#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::fully_sharded {

/// What a rank of a model says of itself while it waits, or once its model is gone.
struct RankRecord {
  bool is_gone = false;  ///< it calls nothing more of the model
  /// Its wait is part of a call of the model; otherwise the program's own, or there is none.
  bool in_call = false;
  std::string place;                    ///< "in step() after 3 backward passes"
  uint64_t group = 0;                   ///< of the collective that it waits for; 0: not known
  uint64_t collective = 0;              ///< its number in that group
  uint64_t needs = 0;                   ///< the ranks without whose call it cannot end, as bits
  std::map<uint64_t, uint64_t> called;  ///< how many collectives it has called in each group

  std::string packed() const;
  static RankRecord unpacked(const std::string& bytes);
};

/// By rank; none: it computes, or has said nothing.
using RankRecords = std::vector<std::optional<RankRecord>>;

/// The ranks that can never go on, by rank: each waits for a call of another of them, or is gone. Whatever the ages of
/// the records: a rank that waits calls nothing, so in a cycle of such waits none was the first to go on. `bits`: that
/// of each rank in RankRecord::needs.
std::vector<bool> ranks_that_never_go_on(const RankRecords& records, const std::vector<uint64_t>& bits);

/// "ranks 0-2 in step() after 3 backward passes, rank 3 in hash() ...", of those ranks.
std::string places_of(const RankRecords& records, const std::vector<bool>& of);

}  // namespace lockstep::fully_sharded
