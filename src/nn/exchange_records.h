#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

/// What a rank says of itself while it waits: in which exchange it is, or where else.
struct ExchangeRecord {
  /// What must not change while a rank waits.
  struct Look {
    bool waits, inside;
    uint64_t exchanges;  ///< begun
    uint64_t others;     ///< collectives besides, begun in any group
    uint64_t beats;
    bool operator==(const Look&) const = default;
  };
  Look look;
  std::string what, place;

  std::string packed() const;
  static ExchangeRecord unpacked(const std::string& text);
};

/// A text of each rank; empty: it has said nothing.
using SaidByRanks = std::vector<std::optional<std::string>>;

/// What is wrong if the ranks stay where their packed records say; empty: nothing, or it is not known.
std::string verdict_on(const SaidByRanks& records);

/// Where the ranks of a group tell each other of their exchanges: keys of its store. Throws if the store is gone. Any
/// thread.
class ExchangeBoard {
 public:
  // What ranks say of themselves, by the reason.
  static constexpr const char *kWaits = "waits", *kFailed = "failed", *kDecided = "decided";

  /// Forgets what this rank wrote for an earlier group over the same store.
  ExchangeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  /// Tells the others `mine` and returns what all have said.
  SaidByRanks tell(const char* kind, const std::string& mine) const;
  bool is_decided_elsewhere() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, world_size_;
};

}  // namespace lockstep
