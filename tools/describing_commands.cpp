#include "describing_commands.h"

#include <algorithm>
#include <iostream>

#include "completion.h"
#include "launch/launch_error.h"
#include "manual.h"
#include "nearest_name.h"

namespace lockstep {

DescribingCommands::DescribingCommands(CLI::App& app)
    : app_(app),
      completion_(app.add_subcommand("completion", "Print the script that completes lockstep in a shell")->group("")),
      manual_(app.add_subcommand("man", "Print the manual page of lockstep, or of a command")->group("")) {
  completion_->add_option("SHELL", shell_, "bash or zsh")->required();
  manual_->add_option("COMMAND", command_, "Such as run");
}

int DescribingCommands::run() const {
  const auto commands = describe_commands(app_);
  if (completion_->parsed()) {
    if (shell_ != "bash" && shell_ != "zsh")
      throw LaunchError(kExitBadCommandLine, "there are completions for bash and zsh; not for '" + shell_ + "'" +
                                                 did_you_mean(shell_, {"bash", "zsh"}));
    std::cout << (shell_ == "bash" ? bash_completion(commands) : zsh_completion(commands));
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
