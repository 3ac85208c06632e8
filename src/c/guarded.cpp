#include "c/guarded.h"

#include <exception>
#include <new>
#include <string>

#include "collectives/shm/protocol/verdict.h"

namespace lockstep::c {
namespace {

/// The core's texts name the option of every language; C programs have their own.
std::string for_c(std::string text) {
  const size_t begin = text.find("ContextOptions::collective_timeout ("), end = text.find(')', begin);
  if (begin != std::string::npos && end != std::string::npos)
    text.replace(begin, end + 1 - begin, "timeout_s of lockstep_options, or the seconds of lockstep_wait()");
  return text;
}

lockstep_status status_of(shm::Verdict::Cause cause, lockstep_status otherwise) {
  switch (cause) {
    case shm::Verdict::Cause::kDied:
    case shm::Verdict::Cause::kLeft:
      return LOCKSTEP_RANK_GONE;
    case shm::Verdict::Cause::kMismatch:
    case shm::Verdict::Cause::kSplits:
    case shm::Verdict::Cause::kMessage:
    case shm::Verdict::Cause::kStuck:
    case shm::Verdict::Cause::kStuckInGroups:
      return LOCKSTEP_MISMATCH;
    case shm::Verdict::Cause::kTimeout:
      return LOCKSTEP_TIMED_OUT;
    case shm::Verdict::Cause::kAborted:
      return LOCKSTEP_ABORTED;
    case shm::Verdict::Cause::kNone:
      break;
  }
  return otherwise;
}

lockstep_status status_of_current(const GroupState* state, lockstep_status otherwise) {
  try {
    throw;
  } catch (const StatusError& error) {
    keep_failure(error.what());
    return error.status();
  } catch (const LimitError& error) {
    keep_failure(error.what());
    return LOCKSTEP_OUT_OF_RESOURCES;
  } catch (const Error& error) {
    keep_failure(for_c(error.what()));
    const bool reads_verdict = state != nullptr && state->generation == fork_generation();
    if (!reads_verdict || !shm::Verdict::exists(state->group.world())) return otherwise;
    return status_of(shm::Verdict::current(state->group.world()).cause, otherwise);
  } catch (const std::bad_alloc&) {
    keep_failure("this process is out of memory");
    return LOCKSTEP_OUT_OF_RESOURCES;
  } catch (const std::exception& error) {
    keep_failure(std::string("unexpected: ") + error.what());
  } catch (...) {
    keep_failure("unexpected: an exception that is not a std::exception");
  }
  return LOCKSTEP_INTERNAL_ERROR;
}

}  // namespace

lockstep_status failed(const GroupState* state, lockstep_status otherwise) noexcept {
  try {
    return status_of_current(state, otherwise);
  } catch (...) {
    return LOCKSTEP_OUT_OF_RESOURCES;  // there is no memory for the text
  }
}

}  // namespace lockstep::c

const char* lockstep_last_error(void) { return lockstep::c::last_failure; }

int lockstep_c_version(void) { return LOCKSTEP_C_VERSION_MAJOR * 1000 + LOCKSTEP_C_VERSION_MINOR; }

const char* lockstep_status_name(lockstep_status status) {
  return lockstep::c::name_of_status(status, "no status of Lockstep");
}
