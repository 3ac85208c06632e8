#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// "; did you mean --tee?", with the element of `known` nearest to `name`, by letters to insert, drop, change or swap
/// with their neighbour; empty if none is near.
std::string did_you_mean(const std::string& name, const std::vector<std::string>& known);

}  // namespace lockstep
