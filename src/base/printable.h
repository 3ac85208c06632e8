#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// The text as it may be shown on a terminal: control characters and what is no UTF-8 become \xNN.
std::string printable(std::string_view text);

}  // namespace lockstep
