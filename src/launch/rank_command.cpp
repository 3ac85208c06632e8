#include "launch/rank_command.h"

#include <algorithm>
#include <sstream>

#include "base/numa.h"
#include "base/usable_cores.h"
#include "launch/debugger.h"
#include "launch/verdict.h"

namespace lockstep {
namespace {

constexpr const char* kDefaultPath = "/usr/local/bin:/usr/bin:/bin";

/// As a shell takes it.
std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

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
  for (int rank = 0; rank < options.ranks; ++rank) {
    RankCommand& command = ranks.emplace_back();
    command.program = program;
    command.arguments = options.command;
    command.placement = place_rank(options.bind, cpus, nodes, rank, options.ranks);
    if (rank != options.debugged_rank) continue;
    auto debugger = under_debugger(program, options.command, path);
    command.program = std::move(debugger.program);
    command.arguments = std::move(debugger.arguments);
  }
  return ranks;
}

std::vector<std::string> plan_warnings(const LaunchOptions& options) {
  std::vector<std::string> warnings;
  const auto cpus = allowed_cpus();
  const double quota = cgroup_cpu_quota();
  const int threads = threads_per_rank(std::vector(static_cast<size_t>(options.ranks), cpus), 0, quota);
  const std::string crowding = crowding_warning(options.ranks, threads_per_rank({cpus}, 0, quota), threads);
  if (!crowding.empty()) warnings.push_back(crowding);
  if (options.bind == Binding::kNuma && usable_nodes(numa_nodes(), cpus).size() < 2)
    warnings.emplace_back(
        "--bind numa changes nothing: all usable cores are of one NUMA node (--bind core gives each rank its own)");
  return warnings;
}

std::string describe_plan(const LaunchOptions& options, const EnvironmentBlock& environment) {
  const auto commands = plan_ranks(options, environment);
  std::ostringstream text;
  for (const std::string& warning : plan_warnings(options)) text << "# " << warning << "\n";
  for (int rank = 0; rank < options.ranks; ++rank) {
    const RankCommand& command = commands[static_cast<size_t>(rank)];
    RankPlace place{.rank = rank, .world_size = options.ranks};
    place.run_dir = options.run_dir.empty() ? "(a new folder under runs/)" : options.run_dir;
    place.debugged = options.debugged_rank.has_value();
    text << "rank " << rank << "\n  program     " << command.program << "\n  command    ";
    for (const auto& argument : command.arguments) text << ' ' << quoted(argument);
    text << "\n  cpus        " << place_text(command.placement) << "\n  environment";
    // Only what the launcher adds or changes: the rest is inherited.
    for (std::string variable : rank_environment({}, place)) {
      const bool descriptor = variable.ends_with("=-1");
      if (descriptor) variable.resize(variable.size() - 2);
      text << ' ' << (descriptor ? variable : quoted(variable)) << (descriptor ? "(a descriptor)" : "");
    }
    text << '\n';
  }
  return text.str();
}

}  // namespace lockstep
