#include "command_text.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <sstream>

#include "run_options.h"

namespace lockstep {
namespace {

/// The lower-case words of "N|auto|gpu".
std::vector<std::string> choices_in(const std::string& value) {
  std::vector<std::string> words;
  if (value.find('|') == std::string::npos) return words;
  std::istringstream parts(value);
  for (std::string word; std::getline(parts, word, '|');)
    if (std::all_of(word.begin(), word.end(), [](unsigned char letter) { return std::islower(letter) != 0; }))
      words.push_back(word);
  return words;
}

OptionText describe_option(const CLI::Option& option) {
  OptionText text{.names = {},
                  .value = option.get_items_expected_max() == 0 ? "" : option.get_type_name(),
                  .words = {},
                  .description = option.get_description(),
                  .default_value = option.get_default_str()};
  if (text.value.ends_with(":FILE")) text.value = "FILE";  // a type, and CLI11's name for its check
  for (const std::string& name : option.get_snames()) text.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) text.names.push_back("--" + name);
  text.words = choices_in(text.value);
  if (text.names.empty()) text.value = option.get_name();
  return text;
}

CommandText describe_command(const CLI::App& command) {
  CommandText text{.name = command.get_name(),
                   .description = command.get_description(),
                   .usage = "lockstep " + command.get_name() + " [OPTIONS]",
                   .options = {},
                   .arguments = {},
                   .footer = command.get_footer()};
  for (const CLI::Option* option : command.get_options()) {
    OptionText one = describe_option(*option);
    if (one.names.empty()) text.usage += " " + one.value;
    (one.names.empty() ? text.arguments : text.options).push_back(std::move(one));
  }
  return text;
}

CommandText describe_run() {
  CommandText text = describe_command(*describe_run_command());
  text.name = "run";
  const std::string usage = kRunUsage;
  text.usage = usage.substr(std::string("Usage: ").size());
  return text;
}

}  // namespace

std::vector<CommandText> describe_commands(const CLI::App& app) {
  std::vector<CommandText> commands;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    if (command->get_name() == "run")
      commands.push_back(describe_run());
    else
      commands.push_back(describe_command(*command));
  for (const CommandText& command : commands) names.push_back(command.name);
  for (CommandText& command : commands)
    for (OptionText& argument : command.arguments)
      if (argument.value == "COMMAND") argument.words = names;
  return commands;
}

}  // namespace lockstep
