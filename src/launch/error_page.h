#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// Where the documents explain an error, by the launcher's code for it: "docs/errors.md, exit code 49".
std::string page_of(int exit_code);

/// The last line of what a program prints about an error: "  page      docs/errors.md, exit code 49\n".
std::string page_line(int exit_code);

/// page_line() for an exception that ends the calling process, which no launcher of Lockstep watches: with the code
/// that `lockstep run` would end with if this rank failed first. Empty under a launcher, whose block names the page.
std::string page_line_of_exception(std::string_view text);

}  // namespace lockstep
