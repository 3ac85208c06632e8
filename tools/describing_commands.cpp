#include "describing_commands.h"

#include <algorithm>
#include <iostream>

#include "launch/launch_error.h"
#include "nearest_name.h"

namespace lockstep {

DescribingCommands::DescribingCommands(CLI::App& app)
    : app_(app),
      completion_(app.add_subcommand("completion", "Print the script that completes lockstep in bash, zsh or fish")),
      manual_(app.add_subcommand("man", "Print the manual page of lockstep, or of a command")) {
  completion_->add_option("SHELL", shell_, "bash, zsh or fish")->required()->type_name("bash|zsh|fish");
  manual_->add_option("COMMAND", command_, "Such as run");
}

std::string DescribingCommands::script(const std::vector<CommandText>& commands) const {
  if (shell_ == "bash") return bash_completion(commands);
  if (shell_ == "zsh") return zsh_completion(commands);
  if (shell_ == "fish") return fish_completion(commands);
  throw LaunchError(kExitBadCommandLine, "there are completions for bash, zsh and fish, not for '" + shell_ + "'" +
                                             did_you_mean(shell_, {"bash", "zsh", "fish"}));
}

int DescribingCommands::run() const {
  const auto commands = describe_commands(app_);
  if (completion_->parsed()) {
    std::cout << script(commands);
  } else if (command_.empty()) {
    std::cout << manual_page(commands);
  } else {
    const auto found =
        std::find_if(commands.begin(), commands.end(), [this](const auto& one) { return one.name == command_; });
    if (found == commands.end()) throw LaunchError(kExitBadCommandLine, "there is no command '" + command_ + "'");
    std::cout << manual_page_of(*found);
  }
  return std::cout.flush() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
