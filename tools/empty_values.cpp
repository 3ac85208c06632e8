#include "empty_values.h"

#include <algorithm>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse_empty(const std::string& name, const CLI::Option& option) {
  const std::string type = option.get_type_name();
  throw LaunchError(kExitBadCommandLine, name + " is empty; give it a value" +
                                             (type.empty() || option.get_positional() ? "" : ", " + type) +
                                             (option.get_required() ? "" : ", or leave it out"));
}

}  // namespace

void refuse_empty_values(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::vector<std::string>& values = option->results();
    if (std::find(values.begin(), values.end(), "") != values.end()) refuse_empty(option->get_name(), *option);
  }
}

void refuse_empty_assignments(const CLI::App& command, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (word == "--") return;
    if (!word.starts_with("--") || !word.ends_with('=') || word.find('=') + 1 != word.size()) continue;
    const std::string name = word.substr(0, word.size() - 1);
    const CLI::Option* option = command.get_option_no_throw(name);
    if (option != nullptr && option->get_items_expected_max() > 0) refuse_empty(name, *option);
  }
}

}  // namespace lockstep
