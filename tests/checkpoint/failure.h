#pragma once

#include <functional>
#include <string>

#include <lockstep/error.h>

namespace lockstep::testing {

/// The text of the Error that `body` throws; "" if it throws none. Any other exception passes through.
inline std::string failure(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::testing
