#pragma once

#include <functional>
#include <string>

#include <c10/util/Exception.h>

namespace lockstep::testing {

/// The text of the c10::Error that `body` throws; "" if it throws none. Any other exception passes through.
inline std::string complaint(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace lockstep::testing
