#include "command_text.h"

#include <algorithm>
#include <cctype>

#include "base/text.h"

namespace lockstep {
namespace {

/// `text` escaped so that man shows it unchanged, on its own line or within one.
std::string escaped(const std::string& text) {
  std::string result;
  bool line_starts = true;
  for (const char letter : text) {
    if (line_starts && (letter == '.' || letter == '\'')) result += "\\&";
    if (letter == '\\')
      result += "\\e";
    else if (letter == '-')
      result += "\\-";
    else
      result += letter;
    line_starts = letter == '\n';
  }
  return result;
}

std::string heading(const std::string& name, const std::string& purpose) {
  std::string upper = name;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  return ".TH " + escaped(upper) + " 1 \"\" \"Lockstep " LOCKSTEP_VERSION "\" \"Lockstep\"\n.SH NAME\n" +
         escaped(name) + " \\- " + escaped(purpose) + "\n";
}

/// Lines that man does not reformat.
std::string as_it_stands(const std::string& text) {
  std::string body = text;
  while (!body.empty() && body.back() == '\n') body.pop_back();
  body.erase(0, body.find_first_not_of('\n'));
  std::string result = ".nf\n";
  for (const std::string& line : lines_of(body)) result += (line.empty() ? ".sp" : escaped(line)) + "\n";
  return result + ".fi\n";
}

std::string first_letter_small(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

std::string describe_options(const CommandText& command) {
  std::string page;
  for (const auto& list : {command.arguments, command.options})
    for (const OptionText& option : list) {
      page += ".TP\n";
      for (size_t i = 0; i < option.names.size(); ++i)
        page += (i == 0 ? "\\fB" : ", \\fB") + escaped(option.names[i]) + "\\fR";
      if (!option.value.empty()) page += (option.names.empty() ? "\\fI" : " \\fI") + escaped(option.value) + "\\fR";
      page += "\n" + escaped(option.description);
      if (!option.default_value.empty()) page += " (default: " + escaped(option.default_value) + ")";
      page += "\n";
    }
  return page;
}

constexpr const char* kSeeAlso =
    "lockstep explain says more about exit codes and messages. The README of the sources leads to the guides.\n";

}  // namespace

std::string manual_page(const std::vector<CommandText>& commands) {
  std::string page = heading("lockstep", "distributed data-parallel training for C++ on LibTorch") +
                     ".SH SYNOPSIS\n\\fBlockstep\\fR \\fICOMMAND\\fR ...\n"
                     ".SH DESCRIPTION\nStarts a program as several ranks, watches them, and shows what they did.\n"
                     ".SH COMMANDS\n";
  for (const CommandText& command : commands) {
    if (command.name == "run") {
      page += ".SS lockstep run [OPTIONS] [\\-\\-] PROGRAM [ARGS...]\n" + escaped(command.description) +
              ": see lockstep\\-run(1).\n";
      continue;
    }
    page += ".SS " + escaped(command.usage) + "\n" + escaped(command.description) + ".\n" + describe_options(command);
  }
  return page + ".SH OPTIONS\n.TP\n\\fB\\-\\-version\\fR\nThe version, and how it was built\n.TP\n\\fB\\-h\\fR, " +
         "\\fB\\-\\-help\\fR\nThe commands; after a command, its options\n.SH SEE ALSO\nlockstep\\-run(1).\n" +
         escaped(kSeeAlso);
}

std::string manual_page_of(const CommandText& command) {
  std::string page = heading("lockstep-" + command.name, first_letter_small(command.description)) + ".SH SYNOPSIS\n" +
                     as_it_stands(command.usage) + ".SH OPTIONS\n" + describe_options(command);
  if (!command.footer.empty()) page += ".SH NOTES\n" + as_it_stands(command.footer);
  return page + ".SH SEE ALSO\nlockstep(1).\n" + escaped(kSeeAlso);
}

}  // namespace lockstep
