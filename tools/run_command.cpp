#include "run_command.h"

#include <iostream>

#include "base/usable_cores.h"
#include "hosts/hosts_plan.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "launch/process/rank_command.h"
#include "machine_facts.h"
#include "run_options.h"

namespace lockstep {
namespace {

int run_on_several_machines(const RunRequest& request, const EnvironmentBlock& environment) {
  const HostsRequest& asked = *request.hosts;
  if (request.dry_run) {
    std::cout << (asked.agent ? hosts::describe_agent(*asked.agent, request.options.command)
                              : hosts::describe_hosts(*asked.coordinator, request.options.command));
    return std::cout.flush() ? kExitOk : kExitStorage;
  }
  const hosts::Key key = asked.key_file.empty() ? hosts::Key::generate() : hosts::Key::from_file(asked.key_file);
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
  if (request.help.empty() && request.hosts) return run_on_several_machines(request, ranks_environment);
  if (request.help.empty() && !request.dry_run) return launch(request.options, ranks_environment);
  std::cout << (request.dry_run ? describe_plan(request.options, ranks_environment) : request.help);
  return std::cout.flush() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
