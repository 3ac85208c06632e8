#pragma once

#include <unistd.h>

#include <cstdint>

namespace lockstep {

/// An address unique to the calling thread while it lives. Distinguishes threads at the cost of one load.
inline const void* thread_token() {
  static thread_local const char token = 0;
  return &token;
}

/// The kernel's number of the calling thread, at the cost of one load. Unlike an address, it is rarely reused for
/// another thread.
inline uint64_t thread_number() {
  constexpr uint64_t kNotYet = ~uint64_t{0};  // see OperationLabel, whose thread-local is not zero either
  static thread_local uint64_t number = kNotYet;
  if (number == kNotYet) number = static_cast<uint64_t>(::gettid());
  return number;
}

}  // namespace lockstep
