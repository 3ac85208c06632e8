#pragma once

#include <string>

#include <lockstep/train_c.h>

#include "c/failure_text.h"

namespace lockstep::train_c {

using c::refuse;
using c::StatusError;

/// The status and the text of the exception that is being handled.
struct Failure {
  lockstep_status status;
  std::string text;
};
Failure current_failure(lockstep_status otherwise);

/// Called in a catch block: keeps the exception's text for lockstep_train_last_error(), and returns its status.
lockstep_status failed(lockstep_status otherwise) noexcept;

/// Runs a function of the C interface: no exception leaves it. `otherwise` is the status of an Error of which nothing
/// more is known.
template <typename Call>
lockstep_status guarded(lockstep_status otherwise, const Call& call) noexcept {
  try {
    call();
    return LOCKSTEP_OK;
  } catch (...) {
    return failed(otherwise);
  }
}

}  // namespace lockstep::train_c
