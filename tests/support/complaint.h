#pragma once

#include <functional>
#include <string>

#include <c10/util/Exception.h>

namespace lockstep::testing {

/// What the c10::Error thrown by `body` says; "" if it throws none. Any other exception passes.
inline std::string complaint(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace lockstep::testing
