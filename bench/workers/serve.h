#pragma once

#include <functional>
#include <string>

namespace lockstep::bench {

/// A worker's life: connects to the socket named by argv's `--socket PATH`, says `hello RANK VERSION`, and answers one
/// command a line until `quit`. Returns the exit status. Every rank has a connection of its own and sleeps in it
/// between commands; one whose connection breaks ends at once, for its peers may be gone too.
int serve_commands(int argc, char** argv, int rank, const std::string& version,
                   const std::function<std::string(const std::string&)>& answer);

/// The value of argv's `NAME VALUE`, or an empty string.
std::string argument(int argc, char** argv, const std::string& name);

}  // namespace lockstep::bench
