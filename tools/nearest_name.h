#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// "; did you mean --tee?": the one of `known` that is nearest to `name`, by letters to insert, drop, change or swap
/// with their neighbour; empty where none is near.
std::string did_you_mean(const std::string& name, const std::vector<std::string>& known);

}  // namespace lockstep
