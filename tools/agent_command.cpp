#include "agent_command.h"

#include <unistd.h>

#include <iostream>
#include <limits>

#include "hosts/agent.h"
#include "hosts/link_probe.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "stacks.h"

namespace lockstep {

int agent_command(const std::vector<std::string>& words, const EnvironmentBlock& environment) {
  if (words.size() == 2 && words[0] == "--stacks") {
    const bool printed = print_stacks(parse_number("--stacks", words[1], 1, std::numeric_limits<int>::max()));
    return std::cout.flush() && printed ? kExitOk : kExitRefusedInput;
  }
  if (words == std::vector<std::string>{"--probe-links"}) return hosts::probe_links();
  hosts::AgentOptions options;
  std::vector<std::string> rest = words;
  const auto take = [&](const std::string& name) {
    for (size_t i = 0; i + 1 < rest.size(); i += 2)
      if (rest[i] == name) return rest[i + 1];
    return std::string();
  };
  std::string list = take("--connect");
  if (rest.size() % 2 != 0 || list.empty())
    throw LaunchError(kExitBadCommandLine, "`lockstep agent` is started by `lockstep run --hosts`, on each machine");
  for (size_t comma; !list.empty(); list = comma == std::string::npos ? "" : list.substr(comma + 1)) {
    comma = list.find(',');
    options.coordinators.push_back(hosts::parse_endpoint("--connect", list.substr(0, comma)));
  }
  options.node = parse_number("--node", take("--node"), 0, kMaxRanks - 1);
  options.interface = take("--interface");
  return hosts::run_agent(options, hosts::Key::from_descriptor(STDIN_FILENO), environment);
}

}  // namespace lockstep
