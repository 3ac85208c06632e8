#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include <lockstep/c.h>

#include "c/failure_text.h"
#include "c/handles.h"

namespace lockstep::c {

/// Options from a program compiled against any version of the header; fields unknown to that version are zero.
template <typename Options>
Options complete(const char* function, const char* type, const Options& given) {
  Options options{};
  if (given.size < sizeof options.size || given.size > 4096)
    refuse(function, "options->size is " + std::to_string(given.size) + "; set it to sizeof(" + type +
                         "), and the other fields to zero or to the values you want");
  std::memcpy(&options, &given, std::min(given.size, sizeof options));
  return options;
}

/// Shows a starting operation on the rank's page; returns its number there. `function` begins with "lockstep_".
uint64_t note_start(const char* function, lockstep_dtype dtype, int64_t count);

/// Called in a catch block: keeps the exception's text for lockstep_last_error, and returns its status. `state` is the
/// group's, whose verdict classifies errors of its core; may be null.
lockstep_status failed(const GroupState* state, lockstep_status otherwise) noexcept;

/// Runs a function of the C interface: no exception leaves it.
template <typename Call>
lockstep_status guarded(const GroupState* state, lockstep_status otherwise, const Call& call) noexcept {
  try {
    call();
    return LOCKSTEP_OK;
  } catch (...) {
    return failed(state, otherwise);
  }
}

/// guarded() for a function of a group, which only one thread at a time may call. `call` receives the group's state.
template <typename Call>
lockstep_status guarded(const char* function, lockstep_group* group, const Call& call) noexcept {
  if (group == nullptr)
    return guarded(nullptr, LOCKSTEP_INTERNAL_ERROR, [&] { refuse(function, "the group is null"); });
  const std::shared_ptr<GroupState>& state = group->state;
  if (state == nullptr)
    return guarded(nullptr, LOCKSTEP_INTERNAL_ERROR, [&] { refuse(function, "this rank has left the group"); });
  return guarded(state.get(), LOCKSTEP_INVALID_ARGUMENT, [&] {
    const CallGuard guard(state->caller, state->group.rank(), fork_generation(), function);
    call(state);
  });
}

}  // namespace lockstep::c
