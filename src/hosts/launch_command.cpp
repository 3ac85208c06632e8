#include "hosts/launch_command.h"

#include <filesystem>
#include <utility>

#include "base/shell_word.h"
#include "launch/launch_error.h"

namespace lockstep::hosts {
namespace {

constexpr std::string_view kHost = "{host}";

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  bool inside = false;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0 ? c == quote : c == '\'' || c == '"') {
      quote = quote != 0 ? 0 : c;
      inside = true;
    } else if (quote == 0 && (c == ' ' || c == '\t')) {
      if (inside) words.push_back(std::exchange(word, {}));
      inside = false;
    } else {
      word.push_back(c);
      inside = true;
    }
  }
  if (quote != 0) throw LaunchError(kExitBadCommandLine, "--launch-command has an unmatched quotation mark: " + text);
  if (inside) words.push_back(word);
  return words;
}

}  // namespace

std::vector<std::string> launch_words(const std::string& launch_command, const std::string& host,
                                      const std::vector<std::string>& agent) {
  std::vector<std::string> words = split(launch_command);
  if (words.empty())
    throw LaunchError(kExitBadCommandLine, "--launch-command is empty; it takes the words that start a program on " +
                                               std::string(kHost) + ", such as: " + kDefaultLaunchCommand);
  for (std::string& word : words)
    for (size_t at = 0; (at = word.find(kHost, at)) != std::string::npos; at += host.size())
      word.replace(at, kHost.size(), host);
  const bool shell = std::filesystem::path(words[0]).filename() == "ssh";
  for (const std::string& one : agent) words.push_back(shell ? shell_word(one) : one);
  return words;
}

std::string command_text(const std::vector<std::string>& command) {
  std::string text;
  for (const std::string& word : command) text += (text.empty() ? "" : " ") + shell_word(word);
  return text;
}

}  // namespace lockstep::hosts
