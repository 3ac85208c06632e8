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

}  // namespace lockstep
