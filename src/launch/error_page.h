#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace lockstep {

/// The last line of what a program prints about an error: the command that explains it by the launcher's code, and
/// prints the row of docs/errors.md, which is not installed: "  explain   lockstep explain 49\n".
std::string page_line(int exit_code);

/// Prints an error that ends the launcher, what there is to add to it (whole lines), and its page; returns the code.
int print_launcher_error(const std::exception& error, int exit_code, const std::string& more = "");

/// page_line() for an exception that ends the calling process, which no launcher of Lockstep watches: with the code
/// that `lockstep run` would end with if this rank failed first. Empty under a launcher, whose block names the page.
std::string page_line_of_exception(std::string_view text);

}  // namespace lockstep
