#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/comm_hook.h>
#include <lockstep/group.h>

#include "base/virtual_ranks.h"

namespace lockstep {

/// Checks for runs with virtual ranks: a backward needs a virtual rank that this process has entered, and some
/// communication hooks cannot be used. In other runs it finds no error.
class EnteredVirtualRank {
 public:
  /// `changes` is called when this process enters or leaves a virtual rank, with the previous one.
  EnteredVirtualRank(const Group& group, std::function<void(std::optional<int> from)> changes);

  /// The reason to refuse a backward that begins now; empty if none.
  std::string objection() const;
  /// TORCH_CHECK fails for a hook that cannot be used with virtual ranks.
  void check(const CommHook* hook) const;

 private:
  const std::shared_ptr<VirtualRanks> ranks_;  ///< null: none
  std::atomic<bool> entered_;
  const std::shared_ptr<void> listening_;
};

}  // namespace lockstep
