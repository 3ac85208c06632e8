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

void refuse_empty_options(const CLI::App& command, const std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    const size_t equals = words[i].find('=');
    const bool is_empty = equals == std::string::npos ? i + 1 < words.size() && words[i + 1].empty()
                                                      : words[i].starts_with("--") && equals + 1 == words[i].size();
    if (!is_empty || !words[i].starts_with('-')) continue;
    const std::string name = words[i].substr(0, equals);
    const CLI::Option* option = command.get_option_no_throw(name);
    if (option != nullptr && option->get_items_expected_max() > 0) refuse_empty(name, *option);
  }
}

void refuse_empty_arguments(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::vector<std::string>& values = option->results();
    if (option->get_positional() && std::find(values.begin(), values.end(), "") != values.end())
      refuse_empty(option->get_name(), *option);
  }
}

}  // namespace lockstep
