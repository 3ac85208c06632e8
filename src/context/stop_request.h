#pragma once

#include <optional>

#include <lockstep/group.h>

#include "rank_page/stop_agreement.h"

namespace lockstep {

/// A request to leave, which all ranks observe at the same call: by their launcher's board, or otherwise by a
/// collective.
class StopRequest {
 public:
  /// Makes SIGTERM and SIGUSR1 such requests from now on, unless the program has its own handlers.
  StopRequest();
  /// REQUIRES: every rank calls it.
  bool heard(const Group& group);

 private:
  std::optional<StopAgreement> agreement_;
};

}  // namespace lockstep
