#include "launch/process/rank_command.h"

#include <algorithm>
#include <climits>
#include <map>
#include <sstream>

#include "base/rank_names.h"
#include "base/shell_word.h"
#include "base/usable_cores.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "launch/process/debugger.h"
#include "launch/process/numa.h"
#include "launch/process/team.h"

namespace lockstep {
namespace {

constexpr const char* kVirtualRanks = "LOCKSTEP_VIRTUAL_RANKS";
constexpr const char* kDefaultPath = "/usr/local/bin:/usr/bin:/bin";

/// Values that only a real start knows.
const std::map<std::string, const char*> kMadeAtTheStart = {{"LOCKSTEP_STORE_FD", "(a descriptor)"},
                                                            {"LOCKSTEP_PAGE_FD", "(a descriptor)"},
                                                            {"LOCKSTEP_MEMORY_FD", "(a descriptor)"},
                                                            {"MASTER_PORT", "(a free port)"},
                                                            {"TORCHELASTIC_RUN_ID", "(a new name)"}};

std::string place_text(const Placement& placement) {
  if (placement.cpus.empty()) return "all that the launcher may use (" + list_ranks(allowed_cpus()) + ")";
  const std::string memory =
      placement.memory_node < 0 ? "" : ", memory of node " + std::to_string(placement.memory_node) + " first";
  return list_ranks(placement.cpus) + memory;
}

}  // namespace

std::vector<RankCommand> plan_ranks(const LaunchOptions& options, const EnvironmentBlock& environment) {
  const std::string path = find_variable(environment, "PATH", kDefaultPath);
  const std::string program = options.program.empty() ? find_program(options.command.at(0), path) : options.program;
  const auto cpus = allowed_cpus();
  const auto nodes = options.bind == Binding::kNuma ? numa_nodes() : std::vector<NumaNode>();
  std::vector<RankCommand> ranks;
  std::vector<std::vector<int>> masks;
  for (int rank = 0; rank < options.ranks; ++rank) {
    RankCommand& command = ranks.emplace_back();
    command.program = program;
    command.arguments = options.command;
    command.placement = place_rank(options.bind, cpus, nodes, rank, options.ranks);
    masks.push_back(command.placement.cpus.empty() ? cpus : command.placement.cpus);
    if (rank != options.debugged_rank) continue;
    auto debugger = under_debugger(program, options.command, path);
    command.program = std::move(debugger.program);
    command.arguments = std::move(debugger.arguments);
  }
  const double quota = cgroup_cpu_quota();
  for (int rank = 0; rank < options.ranks; ++rank) {
    const bool as_before = rank > 0 && options.bind == Binding::kNone;  // saves time with thousands of ranks
    ranks[static_cast<size_t>(rank)].threads = as_before ? ranks[0].threads : threads_per_rank(masks, rank, quota);
  }
  return ranks;
}

void check_elastic(const LaunchOptions& options, const EnvironmentBlock& environment, bool here) {
  if (!options.elastic) return;
  LaunchOptions most = options;
  most.ranks = options.elastic->max;
  if (here) plan_ranks(most, environment);
  const std::string virtual_ranks = find_variable(environment, kVirtualRanks, "");
  if (virtual_ranks.empty()) return;
  const int count = parse_number(kVirtualRanks, virtual_ranks, 1, INT_MAX);
  if (count < most.ranks)
    throw LaunchError(kExitBadCommandLine, "--elastic allows " + std::to_string(most.ranks) + " ranks, but there are " +
                                               "only " + virtual_ranks + " virtual ranks; lower its maximum");
}

std::string elastic_warning(const LaunchOptions& options, const EnvironmentBlock& environment) {
  if (!options.elastic || options.elastic->min == options.elastic->max ||
      !find_variable(environment, kVirtualRanks, "").empty())
    return "";
  return "--elastic without virtual ranks: when the number of ranks changes, so do the batch of a step and the results";
}

std::vector<std::string> plan_warnings(const LaunchOptions& options, const EnvironmentBlock& environment) {
  std::vector<std::string> warnings;
  const auto cpus = allowed_cpus();
  const double quota = cgroup_cpu_quota();
  const int threads = threads_per_rank(std::vector(static_cast<size_t>(options.ranks), cpus), 0, quota);
  const std::string crowding = oversubscription_warning(options.ranks, threads_per_rank({cpus}, 0, quota), threads);
  if (!crowding.empty()) warnings.push_back(crowding);
  if (const std::string bits = elastic_warning(options, environment); !bits.empty()) warnings.push_back(bits);
  if (options.bind == Binding::kNuma && usable_nodes(numa_nodes(), cpus).size() < 2)
    warnings.emplace_back(
        "--bind numa changes nothing: all usable cores belong to one NUMA node (--bind core gives each rank its own)");
  return warnings;
}

std::string describe_plan(const LaunchOptions& options, const EnvironmentBlock& environment) {
  const auto commands = plan_ranks(options, environment);
  std::ostringstream text;
  for (const std::string& warning : plan_warnings(options, environment)) text << "# " << warning << "\n";
  for (int rank = 0; rank < options.ranks; ++rank) {
    const RankCommand& command = commands[static_cast<size_t>(rank)];
    const std::string folder = options.run_dir.empty() ? "(a new folder under runs/)" : options.run_dir;
    const RankPlace place{.rank = rank,
                          .world_size = options.ranks,
                          .run_dir = folder,
                          .store_fd = 0,
                          .page_fd = 0,
                          .memory_fd = 0,
                          .error_file = Team::error_file(folder, rank),
                          .max_restarts = options.max_restarts,
                          .master_port = 1,
                          .run_id = "1",
                          .threads = command.threads,
                          .debugged = options.debugged_rank.has_value()};
    text << "rank " << rank << "\n  program     " << command.program << "\n  command    ";
    for (const auto& argument : command.arguments) text << ' ' << shell_word(argument);
    text << "\n  cpus        " << place_text(command.placement) << "\n  environment";
    // Only the launcher's additions and changes: the rest is inherited.
    for (const std::string& variable : rank_environment(environment, place)) {
      const std::string name = variable.substr(0, variable.find('='));
      const bool inherited = std::find(environment.begin(), environment.end(), variable) != environment.end();
      const auto made = kMadeAtTheStart.find(name);
      if (made != kMadeAtTheStart.end())
        text << ' ' << name << '=' << made->second;
      else if (!inherited || is_launchers_variable(name))
        text << ' ' << shell_word(variable);
    }
    text << '\n';
  }
  return text.str();
}

}  // namespace lockstep
