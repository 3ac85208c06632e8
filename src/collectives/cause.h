#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace lockstep {

/// An exception's message, without the stack trace that LibTorch appends.
inline std::string cause_of(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  return error ? error->what_without_backtrace() : exception.what();
}

}  // namespace lockstep
