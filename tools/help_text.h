#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// How wide a text for people may be: the terminal that stdout is, but at most 100 columns, which is also what a pipe
/// or file gets.
size_t output_columns();

/// `text` broken between its words into lines of at most `columns`. The first one begins at the column `begin`, each
/// other one with `indent` spaces. A longer word stays whole.
std::string wrapped(const std::string& text, size_t columns, size_t begin = 0, size_t indent = 0);

/// --help in lines of output_columns(). (CLI11's own makes a line of each description.)
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_description(const CLI::App* app) const override;
};

}  // namespace lockstep
