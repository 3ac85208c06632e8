#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

constexpr const char* kDefaultLaunchCommand = "ssh -o BatchMode=yes {host}";

/// The words of a template such as "ssh -o BatchMode=yes {host}", split at spaces outside quotes, with {host} replaced
/// by `host`, followed by `agent`. ssh passes its words to a remote shell, so `agent` is quoted for ssh. Throws
/// LaunchError (bad command line).
std::vector<std::string> launch_words(const std::string& launch_command, const std::string& host,
                                      const std::vector<std::string>& agent);

/// A command as one text, quoted for a shell.
std::string command_text(const std::vector<std::string>& command);

}  // namespace lockstep::hosts
