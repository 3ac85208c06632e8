#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// The first difference between ranks' descriptions of something they must agree on, or an empty string: "option 1 is
/// `shuffle` on ranks 0, 2 and `no shuffle` on rank 1". Line i of a description is the `kind` numbered i.
std::string first_difference(const std::string& kind, const std::vector<std::string>& descriptions);

}  // namespace lockstep
