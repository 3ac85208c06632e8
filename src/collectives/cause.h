#pragma once

#include <exception>
#include <functional>
#include <string>

#include <c10/util/Exception.h>

namespace lockstep {

/// An exception's message, without the stack trace that LibTorch appends.
inline std::string cause_of(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  return error ? error->what_without_backtrace() : exception.what();
}

/// cause_of() the exception that `body` throws; "" if it throws none.
inline std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& exception) {
    const std::string cause = cause_of(exception);
    return cause.empty() ? "an exception without a message" : cause;
  }
  return "";
}

}  // namespace lockstep
