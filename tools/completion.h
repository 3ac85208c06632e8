#pragma once

#include <string>
#include <vector>

#include "command_text.h"

namespace lockstep {

/// The scripts that complete `lockstep` in bash, zsh and fish.
std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);
std::string fish_completion(const std::vector<CommandText>& commands);

}  // namespace lockstep
