#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// "1 pass", "2 passes".
inline std::string counted(int64_t number, const char* one, const char* several) {
  return std::to_string(number) + " " + (number == 1 ? one : several);
}

}  // namespace lockstep
