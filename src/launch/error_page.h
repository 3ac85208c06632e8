#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace lockstep {

/// The last line printed about an error: the command that explains the launcher's code by printing the row of
/// docs/errors.md, which is not installed: "  explain   lockstep explain 49\n".
std::string page_line(int exit_code);

/// Prints an error that ends the launcher, additional whole lines, and its page. Returns the code.
int print_launcher_error(const std::exception& error, int exit_code, const std::string& more = "");

/// page_line() for an exception that ends the calling process outside a launcher, with the code with which `lockstep
/// run` would end if this rank failed first. Empty under a launcher, whose block names the page.
std::string page_line_of_exception(std::string_view text);

}  // namespace lockstep
