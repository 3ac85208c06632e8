#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

/// A waiting rank's description of itself: its exchange, or the other place where it waits.
struct ExchangeRecord {
  /// Values that do not change while a rank waits.
  struct Look {
    bool waits, inside;
    uint64_t exchanges;  ///< begun
    uint64_t others;     ///< other collectives begun, in any group
    uint64_t beats;
    bool operator==(const Look&) const = default;
  };
  Look look;
  std::string what, place;

  std::string packed() const;
  static ExchangeRecord unpacked(const std::string& text);
};

/// A text from each rank; none if it has written nothing.
using SaidByRanks = std::vector<std::optional<std::string>>;

/// The diagnosis if the ranks stay where their packed records say; empty if nothing is wrong, or it is unknown.
std::string verdict_on(const SaidByRanks& records);

/// The exchange records of a group's ranks: keys of its store. Throws if the store is gone. Any thread.
class ExchangeBoard {
 public:
  // The kinds of record that ranks write.
  static constexpr const char *kWaits = "waits", *kFailed = "failed", *kDecided = "decided";

  /// Deletes this rank's records of an earlier group over the same store.
  ExchangeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  /// Publishes `mine` and returns the records of all ranks.
  SaidByRanks tell(const char* kind, const std::string& mine) const;
  bool is_decided_elsewhere() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, world_size_;
};

}  // namespace lockstep
