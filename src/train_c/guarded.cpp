#include "train_c/guarded.h"

#include <exception>
#include <limits>
#include <new>
#include <utility>

#include "collectives/cause.h"
#include "rank_page/rank_board.h"

namespace lockstep::train_c {
namespace {

/// The rank's page says why its group ended. The page keeps the first reason, so it speaks of this error only if the
/// texts agree.
lockstep_status status_of(const std::string& text, lockstep_status otherwise) {
  constexpr size_t kCompared = 100;
  const RankStatus page = own_page().read(std::numeric_limits<int>::max());
  // The ranks still work together: an Error about what the program asked for.
  if (page.failure_text.empty() && otherwise == LOCKSTEP_RANK_GONE) return LOCKSTEP_INVALID_ARGUMENT;
  if (page.failure_text.empty() || text.find(page.failure_text.substr(0, kCompared)) == std::string::npos)
    return otherwise;
  switch (page.failure) {
    case RankFailure::kPeer:
      return LOCKSTEP_RANK_GONE;
    case RankFailure::kMismatch:
    case RankFailure::kDiverged:
      return LOCKSTEP_MISMATCH;
    case RankFailure::kMissing:
      return LOCKSTEP_TIMED_OUT;
    default:
      return otherwise;
  }
}

}  // namespace

Failure current_failure(lockstep_status otherwise) {
  try {
    throw;
  } catch (const StatusError& error) {
    return {error.status(), error.what()};
  } catch (const StorageError& error) {
    return {LOCKSTEP_TRAIN_FILE_FAILED, error.what()};
  } catch (const RefusedInput& error) {
    return {LOCKSTEP_TRAIN_FILE_FAILED, error.what()};
  } catch (const LimitError& error) {
    return {LOCKSTEP_OUT_OF_RESOURCES, error.what()};
  } catch (const Error& error) {
    return {status_of(error.what(), otherwise), error.what()};
  } catch (const std::bad_alloc&) {
    return {LOCKSTEP_OUT_OF_RESOURCES, "this process is out of memory"};
  } catch (const std::exception& error) {
    // LibTorch's checks, and what TorchScript code raises: about the arrays and the module.
    return {LOCKSTEP_INVALID_ARGUMENT, cause_of(error)};
  } catch (...) {
    return {LOCKSTEP_INTERNAL_ERROR, "unexpected: an exception that is not a std::exception"};
  }
}

lockstep_status failed(lockstep_status otherwise) noexcept {
  try {
    Failure failure = current_failure(otherwise);
    c::keep_failure(std::move(failure.text));
    return failure.status;
  } catch (...) {
    return LOCKSTEP_OUT_OF_RESOURCES;  // there is no memory for the text
  }
}

}  // namespace lockstep::train_c

const char* lockstep_train_last_error(void) { return lockstep::c::last_failure; }

int lockstep_train_version(void) { return LOCKSTEP_TRAIN_VERSION_MAJOR * 1000 + LOCKSTEP_TRAIN_VERSION_MINOR; }

const char* lockstep_train_status_name(lockstep_status status) {
  if (status == LOCKSTEP_TRAIN_FILE_FAILED) return "LOCKSTEP_TRAIN_FILE_FAILED";
  return lockstep::c::name_of_status(status, "no status of liblockstep_train");
}
