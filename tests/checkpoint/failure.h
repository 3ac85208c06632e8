#pragma once

#include <functional>
#include <string>

#include <lockstep/error.h>

#include "support/told_in_time.h"

namespace lockstep::testing {

/// The text of the Error that `body` throws; "" if it throws none. It must come
/// within five seconds. Any other exception passes through.
inline std::string failure(const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
  } catch (const Error& error) {
    expect_told_in_time(start);
    return error.what();
  }
  return "";
}

}  // namespace lockstep::testing
