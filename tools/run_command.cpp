#include "run_command.h"

#include <iostream>

#include "base/usable_cores.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"
#include "launch/process/rank_command.h"
#include "machine_facts.h"
#include "run_options.h"

namespace lockstep {

int run_command(std::vector<std::string> words, const EnvironmentBlock& environment) {
  const int cores = threads_per_rank({allowed_cpus()}, 0, cgroup_cpu_quota());
  const RunRequest request =
      parse_run_command(std::move(words), cores, count_gpus(find_variable(environment, "CUDA_VISIBLE_DEVICES", "-")));
  const EnvironmentBlock ranks_environment = with_variables(environment, request.variables);
  if (request.help.empty() && !request.dry_run) return launch(request.options, ranks_environment);
  std::cout << (request.dry_run ? describe_plan(request.options, ranks_environment) : request.help);
  return std::cout.flush() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
