#include "explain_command.h"

#include <iostream>

#include "base/text.h"
#include "error_page_text.h"
#include "help_text.h"
#include "launch/launch_error.h"

namespace lockstep {
namespace {

constexpr size_t kShownOfQuery = 80;

/// The message for a query that nothing on the page matches.
std::string refusal(const std::string& query) {
  if (query == "0") return "exit code 0 is not an error: all ranks ended with 0";
  if (query == "1")
    return "`lockstep run` never ends with 1; a program that no launcher started ends with 1, and its last line names "
           "the code to ask for";
  const bool is_long = query.size() > kShownOfQuery;
  return "there is no explanation of '" + printable(query.substr(0, kShownOfQuery)) + (is_long ? "..." : "") +
         "'; `lockstep explain` lists all that there are";
}

}  // namespace

ExplainCommand::ExplainCommand(CLI::App& app)
    : explain_(app.add_subcommand("explain", "Say more about an exit code or an error message, and what to do")) {
  explain_->add_option("WHAT", words_,
                       "An exit code such as 49, a message in quotation marks, or words of one. Without it: a list");
}

int ExplainCommand::run() const {
  std::string query;
  for (const std::string& word : words_) query += (query.empty() ? "" : " ") + word;
  const ErrorPageText page = read_error_page(kErrorPage);
  const std::string text =
      words_.empty() ? list_explained(page, output_columns()) : explain(page, query, output_columns());
  if (text.empty()) throw LaunchError(kExitBadCommandLine, refusal(query));
  std::cout << text;
  return std::cout.flush() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
