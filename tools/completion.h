#pragma once

#include <string>
#include <vector>

#include "command_text.h"

namespace lockstep {

/// The script that completes `lockstep` in bash, and the one for zsh.
std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);

}  // namespace lockstep
