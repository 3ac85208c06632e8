#pragma once

#include <functional>
#include <string>

#include <c10/util/Exception.h>

#include "support/told_in_time.h"

namespace lockstep::testing {

/// The text of the c10::Error that `body` throws; "" if it throws none. It must come
/// within five seconds. Any other exception passes through.
inline std::string complaint(const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
  } catch (const c10::Error& error) {
    expect_told_in_time(start);
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace lockstep::testing
