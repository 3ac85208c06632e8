#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// The text in a form that is safe on a terminal: control characters and invalid UTF-8 become \xNN.
std::string printable(std::string_view text);

/// Its first line in that form.
std::string printable_line(std::string_view text);

}  // namespace lockstep
