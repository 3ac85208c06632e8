#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep {

/// The width of text for people: the terminal's on stdout, but at most 100 columns, which is also the width for a pipe
/// or file.
size_t output_columns();

/// `text` broken between words into lines of at most `columns`. The first line begins at column `begin`, each other one
/// with `indent` spaces. A longer word is not broken.
std::string wrapped(const std::string& text, size_t columns, size_t begin = 0, size_t indent = 0);

/// --help in lines of output_columns(). (CLI11's own formatter puts each description on one line.)
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_description(const CLI::App* app) const override;
};

}  // namespace lockstep
