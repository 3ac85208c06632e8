
#include <unistd.h>

#include <iostream>
#include <limits>

#include "base/usable_cores.h"
#include "doctor_command.h"
#include "hosts/agent.h"
#include "hosts/hosts_plan.h"
#include "hosts/island_agent.h"
#include "hosts/islands.h"
#include "hosts/link_probe.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "launch/option_values.h"
#include "launch/process/rank_command.h"
#include "run_options.h"
#include "status_command.h"

namespace lockstep {
namespace {

hosts::Key key_of(const std::string& file) {
  return file.empty() ? hosts::Key::generate() : hosts::Key::from_file(file);
}

int run_on_several_machines(const RunRequest& request, const EnvironmentBlock& environment) {
  const HostsRequest& asked = *request.hosts;
  if (request.dry_run) {
    std::cout << (asked.agent ? hosts::describe_agent(*asked.agent, request.options.command)
                              : hosts::describe_hosts(*asked.coordinator, request.options.command));
    return std::cout.flush() ? kExitOk : kExitStorage;
  }
  const hosts::Key key = key_of(asked.key_file);
  if (asked.agent) return hosts::run_agent(*asked.agent, key, environment);
  hosts::Coordinator coordinator(*asked.coordinator, key);
  return launch(request.options, environment, &coordinator);
}

}  // namespace

int run_command(std::vector<std::string> words, const EnvironmentBlock& environment) {
  const int cores = threads_per_rank({allowed_cpus()}, 0, cgroup_cpu_quota());
  const RunRequest request = parse_run_command(
      std::move(words), cores, count_gpus(find_variable(environment, "CUDA_VISIBLE_DEVICES", "-")), environment);
  const EnvironmentBlock ranks_environment = with_variables(environment, request.variables);
  if (request.help.empty() && request.islands)
    return hosts::run_islands(*request.islands, key_of(request.islands->key_file), ranks_environment);
  if (request.help.empty() && request.hosts) return run_on_several_machines(request, ranks_environment);
  if (request.help.empty() && !request.dry_run) return launch(request.options, ranks_environment);
  std::cout << (request.dry_run ? describe_plan(request.options, ranks_environment) : request.help);
  return std::cout.flush() ? kExitOk : kExitStorage;
}

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
    throw LaunchError(kExitBadCommandLine,
                      "`lockstep run --hosts` starts `lockstep agent` on each machine; do not start it yourself");
  for (size_t comma; !list.empty(); list = comma == std::string::npos ? "" : list.substr(comma + 1)) {
    comma = list.find(',');
    options.coordinators.push_back(hosts::parse_endpoint("--connect", list.substr(0, comma)));
  }
  options.node = parse_number("--node", take("--node"), 0, kMaxRanks - 1);
  options.interface = take("--interface");
  if (!take("--island").empty())
    return hosts::run_island_agent(options, hosts::Key::from_descriptor(STDIN_FILENO), environment);
  return hosts::run_agent(options, hosts::Key::from_descriptor(STDIN_FILENO), environment);
}

}  // namespace lockstep
