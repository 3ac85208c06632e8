#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

constexpr const char* kDefaultLaunchCommand = "ssh -o BatchMode=yes {host}";

/// The words of a template such as "ssh -o BatchMode=yes {host}", split at spaces outside of quotes, with `host` in the
/// place of {host}, and then `agent`. ssh hands its words to a shell on the other side, so for it those of `agent` are
/// quoted. Throws LaunchError (bad command line).
std::vector<std::string> launch_words(const std::string& launch_command, const std::string& host,
                                      const std::vector<std::string>& agent);

/// A command as one text, quoted for a shell.
std::string command_text(const std::vector<std::string>& command);

}  // namespace lockstep::hosts
