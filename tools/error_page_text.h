#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// docs/errors.md, which is built into the command.
extern const char* const kErrorPage;

/// A page of error messages, taken apart: sections that quote messages and explain them, and tables whose rows explain
/// an exit code or a status.
struct ErrorPageText {
  struct Section {
    std::string title;
    std::vector<std::string> messages;    ///< with ... for what is only known when they are thrown
    std::vector<std::string> paragraphs;  ///< below them, each in one line
    std::vector<size_t> rows;             ///< of its table, as places in ErrorPageText::rows
  };
  struct Row {
    std::string name;  ///< "49", "128 + n", "LOCKSTEP_MISMATCH"
    std::string meaning;
    std::string advice;
    bool is_exit_code() const { return name.find_first_not_of("0123456789 +n") == std::string::npos; }
  };
  std::vector<Section> sections;
  std::vector<Row> rows;
};

/// Reads the page. What stands before its first section is left out.
ErrorPageText read_error_page(const std::string& markdown);

/// The list of topics that can be explained: every exit code, section and status.
std::string list_explained(const ErrorPageText& page, size_t columns);

/// The explanation that `query` asks for: an exit code, a status, the title of a section, a message, or words of any of
/// these. If several fit, their names. Empty: none does.
std::string explain(const ErrorPageText& page, const std::string& query, size_t columns);

}  // namespace lockstep
