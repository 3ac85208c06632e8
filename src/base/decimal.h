#pragma once

#include <array>
#include <charconv>
#include <string>

namespace lockstep {

/// The shortest digits that read back as the same number.
template <typename Number>
std::string decimal(Number value) {
  std::array<char, 32> digits;
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr};
}

}  // namespace lockstep
