#pragma once

#include <memory>
#include <optional>

#include <lockstep/replica.h>

#include "train_c/world.h"

namespace lockstep::train_c {

/// Parameters of a program that has LibTorch itself, behind a lockstep_train_replica.
struct Attached {
  std::shared_ptr<World> world;
  int number;
  std::unique_ptr<Replica> replica;
  std::optional<NoSyncGuard> when_called;  ///< LOCKSTEP_TRAIN_WHEN_CALLED: keeps backward from taking the mean
};

Handles<Attached, lockstep_train_replica>& replicas();

}  // namespace lockstep::train_c
