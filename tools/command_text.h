#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep {

/// The description of a command line as texts, from which `--help`, the completions and the manual are made.
struct OptionText {
  std::vector<std::string> names;  ///< "-n", "--nproc-per-node"; none: a positional argument
  std::string value;               ///< "DIR", "none|core|numa"; empty: it takes none
  std::vector<std::string> words;  ///< possible values, as written: "none", "core" and "numa"; empty: others
  std::string description;
  std::string default_value;

  bool takes_folder() const { return value == "DIR" || value == "RUN"; }
  bool takes_file() const { return value == "FILE" || value == "FROM" || value == "TO"; }
};

struct CommandText {
  std::string name;
  std::string description;
  std::string usage;  ///< one line or several
  std::vector<OptionText> options;
  std::vector<OptionText> arguments;
  std::string footer;
};

/// The commands of `lockstep`. `run` has the options that run_options.h defines.
std::vector<CommandText> describe_commands(const CLI::App& app);

std::string bash_completion(const std::vector<CommandText>& commands);
std::string zsh_completion(const std::vector<CommandText>& commands);
std::string fish_completion(const std::vector<CommandText>& commands);

/// The manual page lockstep(1), with all commands, in man's own language.
std::string manual_page(const std::vector<CommandText>& commands);

/// The manual page of one command, such as lockstep-run(1).
std::string manual_page_of(const CommandText& command);

}  // namespace lockstep
