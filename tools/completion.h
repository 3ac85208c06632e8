#pragma once

#include <string>
#include <vector>

#include "command_text.h"

namespace lockstep {

std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);
std::string fish_completion(const std::vector<CommandText>& commands);

}  // namespace lockstep
