#pragma once

#include <string>
#include <utility>

#include <lockstep/c.h>

#include "base/error.h"

// What the failures of both C interfaces have in common, without torch.
namespace lockstep::c {

class StatusError : public Error {
 public:
  StatusError(lockstep_status status, const std::string& text) : Error(text), status_(status) {}
  lockstep_status status() const { return status_; }

 private:
  lockstep_status status_;
};

/// Throws LOCKSTEP_INVALID_ARGUMENT.
[[noreturn]] inline void refuse(const std::string& function, const std::string& why) {
  throw StatusError(LOCKSTEP_INVALID_ARGUMENT, function + ": " + why);
}

/// The text of this thread's last failure. Initialized with an address, so that reading it before the first failure
/// constructs nothing.
inline thread_local constinit const char* last_failure = "";

inline void keep_failure(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  last_failure = kept.c_str();
}

/// The name of a status of lockstep/c.h; `otherwise` if there is no such status.
inline const char* name_of_status(lockstep_status status, const char* otherwise) {
  switch (status) {
    case LOCKSTEP_OK:
      return "LOCKSTEP_OK";
    case LOCKSTEP_INVALID_ARGUMENT:
      return "LOCKSTEP_INVALID_ARGUMENT";
    case LOCKSTEP_JOIN_FAILED:
      return "LOCKSTEP_JOIN_FAILED";
    case LOCKSTEP_SEVERAL_MACHINES:
      return "LOCKSTEP_SEVERAL_MACHINES";
    case LOCKSTEP_RANK_GONE:
      return "LOCKSTEP_RANK_GONE";
    case LOCKSTEP_MISMATCH:
      return "LOCKSTEP_MISMATCH";
    case LOCKSTEP_TIMED_OUT:
      return "LOCKSTEP_TIMED_OUT";
    case LOCKSTEP_ABORTED:
      return "LOCKSTEP_ABORTED";
    case LOCKSTEP_OUT_OF_RESOURCES:
      return "LOCKSTEP_OUT_OF_RESOURCES";
    case LOCKSTEP_INTERNAL_ERROR:
      return "LOCKSTEP_INTERNAL_ERROR";
    default:
      return otherwise;
  }
}

}  // namespace lockstep::c
