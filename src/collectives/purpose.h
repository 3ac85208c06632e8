#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

// The purpose of a collective's call in messages (OperationLabel).

namespace lockstep {

/// "barrier() of DistributedDataParallel()"; the call alone if it has no known purpose.
inline std::string call_of_purpose(const std::string& call, std::string_view purpose) {
  return purpose.empty() ? call : call + " of " + std::string(purpose);
}

/// Advice for ranks that called collectives for these purposes when the calls do not match: " Where one rank calls
/// main_first(), every rank must." A purpose that is a function's name ends with "()"; without one, returns nothing.
inline std::string advice_on(const std::vector<std::string>& purposes) {
  std::vector<std::string> functions;
  for (const std::string& purpose : purposes)
    if (purpose.ends_with("()") && std::find(functions.begin(), functions.end(), purpose) == functions.end())
      functions.push_back(purpose);
  std::string text;
  for (const std::string& function : functions) text += (text.empty() ? " Where one rank calls " : " or ") + function;
  return text.empty() ? "" : text + ", every rank must, in the same order.";
}

}  // namespace lockstep
