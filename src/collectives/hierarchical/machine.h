#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/hierarchical/layout.h"
#include "collectives/shm/backend/shm_backend.h"

namespace lockstep::hierarchical_engine {

/// The card that the ranks of a machine exchange at every meeting. The first member must be equal on all.
struct Card {
  uint64_t tag = 0;
  uint64_t place = 0;   ///< of the rank's data; see Machine::at()
  uint64_t stride = 0;  ///< bytes from row to row
  uint64_t rounds = 0;
};

/// Thrown when the ranks at a meeting disagree: their tags differ.
struct Disagreement {};

/// The ranks of this rank's machine, which can access each other's memory. Also used by a rank alone on its machine.
class Machine {
 public:
  /// `shared` is undefined if this rank is alone.
  Machine(const Layout& layout, c10::intrusive_ptr<shm_engine::ShmBackend> shared)
      : layout_(layout), shared_(std::move(shared)) {}

  int size() const { return layout_.ranks_on(layout_.here()); }
  int local() const { return layout_.local(); }
  shm_engine::ShmBackend* shared() const { return shared_.get(); }

  /// Whether the other ranks can access this memory.
  bool reaches(const void* memory, size_t bytes) const {
    return !shared_ || shared_->core().arena()->contains(memory, bytes);
  }
  /// Memory that the other ranks can access, valid from an operation's first meeting to its last.
  std::byte* stage(size_t bytes);
  /// Such memory, as a Card encodes it.
  uint64_t place_of(const void* memory) const;
  /// Its address in this process.
  std::byte* at(int local, uint64_t place) const;

  /// Waits for all ranks of the machine, and returns their cards. Throws Disagreement on all of them.
  std::vector<Card> meet(const Card& mine, std::chrono::milliseconds timeout) const;
  /// Waits for all ranks of the machine.
  void wait_for_all(std::chrono::milliseconds timeout) const;

 private:
  const Layout& layout_;
  const c10::intrusive_ptr<shm_engine::ShmBackend> shared_;
  at::Tensor stage_;
};

/// The ranks of this machine as their own group; undefined if this rank is alone.
/// REQUIRES: all of them call it.
c10::intrusive_ptr<shm_engine::ShmBackend> form_machine(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const Layout& layout, std::chrono::milliseconds timeout,
                                                        std::chrono::milliseconds join_timeout);

}  // namespace lockstep::hierarchical_engine
