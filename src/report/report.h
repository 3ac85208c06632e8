#pragma once

#include <string>

namespace lockstep {

/// Draws the run of a folder as an HTML page at `output`, by default <folder>/report.html. Returns the page's path.
/// Throws Error if the folder contains no run or the page cannot be written.
std::string write_report(const std::string& folder, const std::string& output = "");

}  // namespace lockstep
