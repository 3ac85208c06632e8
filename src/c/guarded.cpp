#include "c/guarded.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "collectives/shm/protocol/verdict.h"

namespace lockstep::c {
namespace {

/// Initialized with an address, not with zeros: see OperationLabel.
thread_local constinit const char* shown = "";

void keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  shown = kept.c_str();
}

/// The core's texts name the option of every language; C programs have their own.
std::string for_c(std::string text) {
  const size_t begin = text.find("ContextOptions::collective_timeout ("), end = text.find(')', begin);
  if (begin != std::string::npos && end != std::string::npos)
    text.replace(begin, end + 1 - begin, "timeout_s of lockstep_options");
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
    keep(error.what());
    return error.status();
  } catch (const LimitError& error) {
    keep(error.what());
    return LOCKSTEP_OUT_OF_RESOURCES;
  } catch (const Error& error) {
    keep(for_c(error.what()));
    const bool reads_verdict = state != nullptr && state->generation == fork_generation();
    if (!reads_verdict || !shm::Verdict::exists(state->group.world())) return otherwise;
    return status_of(shm::Verdict::current(state->group.world()).cause, otherwise);
  } catch (const std::bad_alloc&) {
    keep("this process is out of memory");
    return LOCKSTEP_OUT_OF_RESOURCES;
  } catch (const std::exception& error) {
    keep(std::string("unexpected: ") + error.what());
  } catch (...) {
    keep("unexpected: an exception that is not a std::exception");
  }
  return LOCKSTEP_INTERNAL_ERROR;
}

}  // namespace

void refuse(const char* function, const std::string& why) {
  throw StatusError(LOCKSTEP_INVALID_ARGUMENT, std::string(function) + ": " + why);
}

lockstep_status failed(const GroupState* state, lockstep_status otherwise) noexcept {
  try {
    return status_of_current(state, otherwise);
  } catch (...) {
    return LOCKSTEP_OUT_OF_RESOURCES;  // there is no memory for the text
  }
}

}  // namespace lockstep::c

const char* lockstep_last_error(void) { return lockstep::c::shown; }

int lockstep_c_version(void) { return LOCKSTEP_C_VERSION_MAJOR * 1000 + LOCKSTEP_C_VERSION_MINOR; }

const char* lockstep_status_name(lockstep_status status) {
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
      return "no status of Lockstep";
  }
}
