#pragma once

#include <functional>
#include <string>

#include <lockstep/error.h>

namespace lockstep::testing {

/// What the Error thrown by `body` says; "" if it throws none. Any other exception passes.
inline std::string failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::testing
