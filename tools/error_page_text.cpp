#include "error_page_text.h"

#include <string.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "base/text.h"
#include "help_text.h"

namespace lockstep {
namespace {

using Section = ErrorPageText::Section;
using Row = ErrorPageText::Row;

constexpr size_t kFewestLettersOfMessage = 12;  ///< a shorter quoted message says nothing
constexpr int kFirstSignalCode = 128, kLastSignal = 64;
constexpr size_t kIndent = 2;

std::string lower_case(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return text;
}

/// The anchor by which GitHub links to a section: "The replicas have diverged" -> "the-replicas-have-diverged".
std::string anchor_of(const std::string& title) {
  std::string anchor;
  for (const char letter : lower_case(title))
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_' || letter == '-')
      anchor += letter;
    else if (letter == ' ')
      anchor += '-';
  return anchor;
}

const Section* section_of(const ErrorPageText& page, const std::string& anchor) {
  for (const Section& section : page.sections)
    if (anchor_of(section.title) == anchor) return &section;
  return nullptr;
}

/// `text` for a terminal: a link to a section becomes its title, any other link its text. Appends the sections to
/// `linked`.
std::string without_links(const ErrorPageText& page, const std::string& text,
                          std::vector<const Section*>* linked = nullptr) {
  std::string result;
  size_t at = 0;
  for (;;) {
    const size_t open = text.find('[', at), middle = text.find("](", open), close = text.find(')', middle);
    if (open == std::string::npos || middle == std::string::npos || close == std::string::npos) break;
    result += text.substr(at, open - at);
    const std::string shown = text.substr(open + 1, middle - open - 1);
    const std::string target = text.substr(middle + 2, close - middle - 2);
    const Section* section = target.starts_with('#') ? section_of(page, target.substr(1)) : nullptr;
    if (section != nullptr && linked != nullptr) linked->push_back(section);
    if (section != nullptr)
      result += "\"" + section->title + "\"";
    else
      result += shown;
    at = close + 1;
  }
  result += text.substr(at);
  for (size_t bold = result.find("**"); bold != std::string::npos; bold = result.find("**")) result.erase(bold, 2);
  return result;
}

std::string paragraph_text(const std::string& text, size_t columns, size_t indent = kIndent) {
  return std::string(indent, ' ') + wrapped(text, columns, indent, indent) + "\n";
}

std::string title_of(const Row& row) {
  return (row.is_exit_code() ? "exit code " : "") + row.name + (row.meaning.empty() ? "" : ": " + row.meaning);
}

std::string show(const ErrorPageText& page, const Section& section, size_t columns) {
  std::string text = section.title + "\n";
  for (const std::string& message : section.messages)
    text += "\n  > " + wrapped(message, columns, kIndent + 2, kIndent + 2) + "\n";
  for (const std::string& paragraph : section.paragraphs)
    text += "\n" + paragraph_text(without_links(page, paragraph), columns);
  if (!section.rows.empty()) text += "\n";
  for (const size_t at : section.rows) {
    const Row& row = page.rows[at];
    text += paragraph_text(title_of(row), columns) +
            paragraph_text("-> " + without_links(page, row.advice), columns, 2 * kIndent);
  }
  return text;
}

std::string show(const ErrorPageText& page, const Row& row, size_t columns, const std::string& title) {
  std::vector<const Section*> linked;
  std::string text = wrapped(title, columns) + "\n\n" +
                     paragraph_text("What to do: " + without_links(page, row.advice, &linked), columns);
  for (const Section* section : linked) text += "\n" + show(page, *section, columns);
  return text;
}

std::vector<std::string> words_asked(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char letter : lower_case(text))
    if (std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_')
      words.back() += letter;
    else if (!words.back().empty())
      words.emplace_back();
  if (words.back().empty()) words.pop_back();
  return words;
}

bool has_all(const std::string& text, const std::vector<std::string>& words) {
  const std::string lower = lower_case(text);
  return std::all_of(words.begin(), words.end(),
                     [&](const std::string& word) { return lower.find(word) != std::string::npos; });
}

/// The number of letters at the end of `text`, from `at` on, with which `part` begins: a message that was cut off.
size_t letters_at_end(const std::string& part, const std::string& text, size_t at) {
  for (size_t letters = std::min(part.size(), text.size() - at); letters >= kFewestLettersOfMessage; --letters)
    if (text.ends_with(part.substr(0, letters))) return letters;
  return 0;
}

/// The number of letters of a quoted message, with ... for anything, found in `text`, which may end before the message
/// does; 0: it is another message.
size_t letters_of(const std::string& message, const std::string& text) {
  size_t letters = 0, at = 0;
  for (size_t begin = 0; begin <= message.size();) {
    const size_t end = std::min(message.find("...", begin), message.size());
    std::string part = message.substr(begin, end - begin);
    part.erase(0, std::min(part.find_first_not_of(' '), part.size()));
    while (!part.empty() && part.back() == ' ') part.pop_back();
    const size_t found = text.find(part, at);
    if (found == std::string::npos) {
      const size_t cut_off = letters_at_end(part, text, at);
      return cut_off == 0 ? 0 : letters + cut_off;
    }
    at = found + part.size();
    letters += part.size();
    begin = end + 3;
  }
  return letters;
}

/// The exit code in a query: "49", "exit code 49"; -1: none.
int code_asked(const std::string& query) {
  const std::vector<std::string> words = words_asked(query);
  if (words.empty() || words.size() > 3 || words.back().find_first_not_of("0123456789") != std::string::npos ||
      words.back().size() > 3)
    return -1;
  const bool asked = words.size() == 1 || words[words.size() - 2] == "code" || words[words.size() - 2] == "exit";
  return asked ? std::stoi(words.back()) : -1;
}

const Row* row_of(const ErrorPageText& page, const std::string& name) {
  const auto row = std::find_if(page.rows.begin(), page.rows.end(),
                                [&](const Row& one) { return lower_case(one.name) == lower_case(name); });
  return row == page.rows.end() ? nullptr : &*row;
}

std::string explain_code(const ErrorPageText& page, int code, size_t columns) {
  if (const Row* row = row_of(page, std::to_string(code))) return show(page, *row, columns, title_of(*row));
  const Row* signals = row_of(page, "128 + n");
  const int signal = code - kFirstSignalCode;
  if (signals == nullptr || signal < 1 || signal > kLastSignal) return "";
  const char* name = ::sigabbrev_np(signal);
  return show(page, *signals, columns,
              "exit code " + std::to_string(code) + ", which is 128 + " + std::to_string(signal) +
                  (name == nullptr ? "" : std::string(", ended by SIG") + name));
}

/// The matches of `words` in the best of three places: titles, messages, texts.
std::string explain_words(const ErrorPageText& page, const std::vector<std::string>& words, size_t columns) {
  for (int place = 0; place < 3; ++place) {
    std::vector<std::string> titles, texts;
    for (const Section& section : page.sections) {
      std::string searched = section.title;
      for (const std::string& message : section.messages) searched += place >= 1 ? "\n" + message : "";
      for (const std::string& paragraph : section.paragraphs) searched += place >= 2 ? "\n" + paragraph : "";
      if (!has_all(searched, words)) continue;
      titles.push_back(section.title);
      texts.push_back(show(page, section, columns));
    }
    for (const Row& row : page.rows) {
      if (!has_all(title_of(row) + (place >= 2 ? "\n" + row.advice : ""), words)) continue;
      titles.push_back(title_of(row));
      texts.push_back(show(page, row, columns, title_of(row)));
    }
    if (texts.size() == 1) return texts[0];
    if (texts.empty()) continue;
    std::string list = "Several sections match; give more words of one, or its exit code:\n\n";
    for (const std::string& title : titles)
      list += "  " + wrapped(without_links(page, title), columns, kIndent, 2 * kIndent) + "\n";
    return list;
  }
  return "";
}

/// The cells of "| a | b |".
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream parts(line.substr(1));
  for (std::string cell; std::getline(parts, cell, '|');) {
    cell.erase(0, std::min(cell.find_first_not_of(' '), cell.size()));
    while (!cell.empty() && cell.back() == ' ') cell.pop_back();
    cells.push_back(cell);
  }
  return cells;
}

}  // namespace

ErrorPageText read_error_page(const std::string& markdown) {
  ErrorPageText page;
  bool paragraph_goes_on = false, rows = false;
  for (const std::string& line : lines_of(markdown)) {
    if (line.starts_with("## ")) {
      page.sections.push_back({line.substr(3), {}, {}, {}});
      rows = paragraph_goes_on = false;
    } else if (page.sections.empty()) {
      continue;
    } else if (line.starts_with("| ---")) {
      rows = true;
    } else if (line.starts_with("| ")) {
      const std::vector<std::string> cells = cells_of(line);
      if (!rows || cells.size() < 2) continue;
      page.sections.back().rows.push_back(page.rows.size());
      page.rows.push_back({cells[0], cells.size() > 2 ? cells[1] : "", cells.back()});
    } else if (line.starts_with("> ")) {
      page.sections.back().messages.push_back(line.substr(2));
    } else if (line.empty()) {
      paragraph_goes_on = false;
    } else {
      auto& paragraphs = page.sections.back().paragraphs;
      if (paragraph_goes_on)
        paragraphs.back() += " " + line;
      else
        paragraphs.push_back(line);
      paragraph_goes_on = true;
    }
  }
  return page;
}

std::string list_explained(const ErrorPageText& page, size_t columns) {
  std::string text =
      wrapped("`lockstep explain` says more about an exit code, a section or a message:", columns) + "\n";
  text += "  lockstep explain 49\n  lockstep explain shared memory\n";
  text += "  lockstep explain \"the ranks do not hold the same model\"\n\nExit codes of lockstep run:\n";
  for (const Row& row : page.rows) {
    if (!row.is_exit_code()) continue;
    const std::string name = row.name.size() < 3 ? std::string(3 - row.name.size(), ' ') + row.name : row.name;
    text += "  " + name + "  " + wrapped(without_links(page, row.meaning), columns, name.size() + 4, name.size() + 4) +
            "\n";
  }
  text += "\nSections:\n";
  for (const Section& section : page.sections) text += paragraph_text(section.title, columns);
  text += "\nStatuses of liblockstep_c:\n";
  for (const Row& row : page.rows)
    if (!row.is_exit_code()) text += "  " + row.name + "\n";
  return text;
}

std::string explain(const ErrorPageText& page, const std::string& query, size_t columns) {
  if (const int code = code_asked(query); code >= 0) return explain_code(page, code, columns);
  if (const Row* row = row_of(page, query)) return show(page, *row, columns, title_of(*row));
  const std::vector<std::string> words = words_asked(query);
  if (words.empty()) return "";
  for (const Section& section : page.sections)
    if (words_asked(section.title) == words) return show(page, section, columns);
  const Section* quoted = nullptr;
  size_t most = kFewestLettersOfMessage - 1;
  for (const Section& section : page.sections)
    for (const std::string& message : section.messages)
      if (const size_t letters = letters_of(message, query); letters > most) {
        most = letters;
        quoted = &section;
      }
  if (quoted != nullptr) return show(page, *quoted, columns);
  return explain_words(page, words, columns);
}

}  // namespace lockstep
