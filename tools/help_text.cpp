#include "help_text.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace lockstep {
namespace {

constexpr size_t kMostColumns = 100, kFewestColumns = 50;

/// `name` in its own column or, if it is too long for that, above its description.
std::string entry(const std::string& name, const std::string& description, size_t width) {
  std::string text = "  " + name;
  if (text.size() + 1 > width)
    text += "\n" + std::string(width, ' ');
  else
    text.append(width - text.size(), ' ');
  return text + wrapped(description, output_columns(), width, width) + "\n";
}

}  // namespace

size_t output_columns() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kMostColumns;
  return std::clamp<size_t>(size.ws_col, kFewestColumns, kMostColumns);
}

std::string wrapped(const std::string& text, size_t columns, size_t begin, size_t indent) {
  std::istringstream words(text);
  std::string result;
  size_t column = begin;
  bool line_starts = true;
  for (std::string word; words >> word;) {
    if (!line_starts && column + 1 + word.size() > columns) {
      result += "\n" + std::string(indent, ' ');
      column = indent;
      line_starts = true;
    }
    if (!line_starts) result += ' ';
    column += word.size() + (line_starts ? 0 : 1);
    result += word;
    line_starts = false;
  }
  return result;
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  return entry(make_option_name(option, is_positional) + make_option_opts(option), make_option_desc(option),
               column_width_);
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  return entry(command->get_name(), command->get_description(), column_width_);
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  return wrapped(app->get_description(), output_columns()) + "\n";
}

}  // namespace lockstep
