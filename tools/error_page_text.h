#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// docs/errors.md, built into the command.
extern const char* const kErrorPage;

/// A parsed page of error messages: sections that quote messages and explain them, and tables whose rows explain an
/// exit code or a status.
struct ErrorPageText {
  struct Section {
    std::string title;
    std::vector<std::string> messages;    ///< with ... for parts known only when they are thrown
    std::vector<std::string> paragraphs;  ///< below them, each in one line
    std::vector<size_t> rows;             ///< of its table, as indices in ErrorPageText::rows
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

/// Reads the page. Text before its first section is left out.
ErrorPageText read_error_page(const std::string& markdown);

/// The list of topics that can be explained: every exit code, section and status.
std::string list_explained(const ErrorPageText& page, size_t columns);

/// The explanation for `query`: an exit code, a status, the title of a section, a message, or words of any of these. If
/// several match, their names. Empty: none matches.
std::string explain(const ErrorPageText& page, const std::string& query, size_t columns);

}  // namespace lockstep
