#pragma once

#include <string>
#include <vector>

#include "command_text.h"

namespace lockstep {

/// The manual page lockstep(1), with all commands, in man's own language.
std::string manual_page(const std::vector<CommandText>& commands);

/// The manual page of one command, such as lockstep-run(1).
std::string manual_page_of(const CommandText& command);

}  // namespace lockstep
