#pragma once

#include <optional>

#include <lockstep/group.h>

#include "rank_page/stop_agreement.h"

namespace lockstep {

/// A request to leave, as all ranks hear of it at the same call: on the board of their launcher, or else by a
/// collective.
class StopRequest {
 public:
  /// From now on SIGTERM and SIGUSR1 are such requests, where the program has no handlers of its own.
  StopRequest();
  /// Every rank calls it.
  bool heard(const Group& group);

 private:
  std::optional<StopAgreement> agreement_;
};

}  // namespace lockstep
