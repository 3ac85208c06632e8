#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/call_place.h"

namespace lockstep {

/// A rank's description of itself while it waits (GroupsWatch), or as it leaves a scope of calls.
struct WaitRecord {
  /// Messages between this rank and another.
  struct Messages {
    uint64_t group = 0;
    uint64_t peer = 0;  ///< its bit
    bool is_send = false;
    int64_t tag = 0;  ///< MessageCounts::kNoTag: there are some that are not counted
    auto operator<=>(const Messages&) const = default;
  };
  struct Count {
    uint64_t calls = 0, done = 0;
  };
  struct Message {
    bool is_send = false, needs_receive = false;  ///< as in WaitedMessage
    int64_t tag = 0;
    bool operator==(const Message&) const = default;
  };

  uint64_t serial = 0;                  ///< different for each wait
  std::string place;                    ///< "in step() after 3 backwards"
  CallPlace::Caller caller{};           ///< in whose call
  uint64_t group = 0;                   ///< in which it waits; 0: unknown
  uint64_t number = 0;                  ///< of the collective in the group, or of the message among messages of its tag
  uint64_t needs = 0;                   ///< the ranks whose call it needs to end, as bits
  bool needs_some = false;              ///< at least one of these, it is not known which, rather than all
  std::optional<Message> message{};     ///< none: it waits for a collective
  std::map<uint64_t, uint64_t> called;  ///< the number of collectives that it has called in each group
  std::map<Messages, Count> messages;

  std::string packed() const;
  static WaitRecord unpacked(const std::string& bytes);
};

/// By rank; none: it computes, or has reported nothing.
using WaitRecords = std::vector<std::optional<WaitRecord>>;
/// Ranks that have left a scope of calls, by scope.
using Departures = std::map<std::string, WaitRecords>;

/// The ranks that can never continue, by rank: each waits for a call by another of them, or by a rank that makes no
/// more such calls. The ages of the records do not matter: a waiting rank makes no calls, so in a cycle of such waits
/// no rank was the first to continue. `bits` are those of each rank in WaitRecord::needs.
std::vector<bool> ranks_that_never_go_on(const WaitRecords& records, const std::vector<uint64_t>& bits,
                                         const Departures& gone = {});

/// "the ranks wait for each other, so none can go on: ranks 0-2 in ...; rank 3 in ...", for those ranks.
std::string deadlock_text(const WaitRecords& records, const std::vector<bool>& stuck, const Departures& gone = {});
/// "ranks 0-2 in step() after 3 backwards; rank 3 in hash()", for those ranks.
std::string places_of(const WaitRecords& records, const std::vector<bool>& of);
std::vector<bool> known_ones(const WaitRecords& records);

}  // namespace lockstep
