#pragma once

#include <string>

namespace lockstep {

/// Whether `folder` is that of a run of --islands.
bool has_rounds(const std::string& folder);

/// Which machine has taken part in the rounds of a run of --islands, during the run and after it. Throws LaunchError
/// (refused input) if its file is of another form.
std::string rounds_text(const std::string& folder);

}  // namespace lockstep
