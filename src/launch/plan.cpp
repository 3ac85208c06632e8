#include "launch/plan.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <ctime>
#include <filesystem>
#include <string_view>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

/// Variables that this launcher sets or removes.
constexpr std::string_view kReplaced[] = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "LOCKSTEP_ADDRESS",
    "LOCKSTEP_DEBUGGED",
    "LOCKSTEP_MEMORY_FD",
    "LOCKSTEP_PAGE_FD",
    "LOCKSTEP_RUN_DIR",
    "LOCKSTEP_STORE_FD",
    "LOCKSTEP_TERMINAL",
    "LOCKSTEP_THREADS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
};

constexpr const char* kThreads = "OMP_NUM_THREADS";  // torchrun sets it, too, to 1

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

bool is_program(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

[[noreturn]] void throw_not_started(const std::string& text) { throw LaunchError(kExitNotStarted, text); }

}  // namespace

std::string new_run_id(std::chrono::system_clock::time_point now, int pid) {
  return "lockstep-" + std::to_string(std::chrono::system_clock::to_time_t(now)) + "-" + std::to_string(pid);
}

EnvironmentBlock rank_environment(const EnvironmentBlock& inherited, const RankPlace& place) {
  const std::string threads = find_variable(inherited, kThreads, "");
  const bool threads_are_ours =
      place.threads > 0 && (threads.empty() || threads == find_variable(inherited, "LOCKSTEP_THREADS", ""));
  EnvironmentBlock block;
  for (const auto& variable : inherited) {
    const bool replaced =
        std::find(std::begin(kReplaced), std::end(kReplaced), name_of(variable)) != std::end(kReplaced);
    if (!replaced && !(threads_are_ours && name_of(variable) == kThreads)) block.push_back(variable);
  }
  const auto add = [&](const char* name, const std::string& value) {
    block.push_back(std::string(name) + "=" + value);
  };
  add("RANK", std::to_string(place.rank));
  add("WORLD_SIZE", std::to_string(place.world_size));
  const bool together = place.local_world_size == 0;
  add("LOCAL_RANK", std::to_string(together ? place.rank : place.local_rank));
  add("LOCAL_WORLD_SIZE", std::to_string(together ? place.world_size : place.local_world_size));
  // torchrun's other variables, for programs that read them. Rank 0 of such a program opens the store; nothing listens
  // on the port before.
  add("GROUP_RANK", std::to_string(place.node));
  add("GROUP_WORLD_SIZE", std::to_string(place.nodes));
  add("ROLE_RANK", std::to_string(place.rank));
  add("ROLE_WORLD_SIZE", std::to_string(place.world_size));
  add("ROLE_NAME", "default");
  if (place.master_port > 0) {
    add("MASTER_ADDR", place.master_address.empty() ? "127.0.0.1" : place.master_address);
    add("MASTER_PORT", std::to_string(place.master_port));
  }
  if (!place.run_id.empty()) add("TORCHELASTIC_RUN_ID", place.run_id);
  if (threads_are_ours) {
    add(kThreads, std::to_string(place.threads));
    add("LOCKSTEP_THREADS", std::to_string(place.threads));  // so that whoever reads the other knows whose it is
  }
  if (!place.address.empty()) add("LOCKSTEP_ADDRESS", place.address);
  if (!place.run_dir.empty()) add("LOCKSTEP_RUN_DIR", place.run_dir);
  add("LOCKSTEP_STORE_FD", std::to_string(place.store_fd));
  if (place.page_fd >= 0) add("LOCKSTEP_PAGE_FD", std::to_string(place.page_fd));
  if (place.memory_fd >= 0) add("LOCKSTEP_MEMORY_FD", std::to_string(place.memory_fd));
  if (!place.error_file.empty()) add("TORCHELASTIC_ERROR_FILE", place.error_file);
  add("TORCHELASTIC_RESTART_COUNT", std::to_string(place.restarts));
  add("TORCHELASTIC_MAX_RESTARTS", std::to_string(place.max_restarts));
  if (!place.mark.empty()) block.push_back(place.mark);
  if (place.debugged) add("LOCKSTEP_DEBUGGED", "1");
  if (place.terminal_columns) add("LOCKSTEP_TERMINAL", std::to_string(*place.terminal_columns));
  return block;
}

bool is_launchers_variable(const std::string& name) {
  return std::find(std::begin(kReplaced), std::end(kReplaced), name) != std::end(kReplaced);
}

EnvironmentBlock with_variables(const EnvironmentBlock& environment, const EnvironmentBlock& variables) {
  EnvironmentBlock block = environment;
  for (const auto& variable : variables) {
    std::erase_if(block, [&](const std::string& old) { return name_of(old) == name_of(variable); });
    block.push_back(variable);
  }
  return block;
}

std::string find_variable(const EnvironmentBlock& environment, const std::string& name, const std::string& fallback) {
  for (const auto& variable : environment)
    if (name_of(variable) == name && variable.size() > name.size()) return variable.substr(name.size() + 1);
  return fallback;
}

int parse_rank_count(const std::string& option, const std::string& text, int usable_cores, int gpus) {
  if (text == "auto" || text == "cpu") return usable_cores;
  if (text == "gpu" && gpus > 0) return std::min(gpus, kMaxRanks);
  if (text == "gpu")
    throw LaunchError(kExitBadCommandLine, option + " gpu: no GPU is visible; give a number, or auto for the cores");
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 1 || count > kMaxRanks)
    throw LaunchError(kExitBadCommandLine, option + " takes the number of ranks, a whole number from 1 to " +
                                               std::to_string(kMaxRanks) + ", or auto; it got '" + text + "'");
  return count;
}

std::string find_program(const std::string& name, const std::string& search_path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (name.find('/') != std::string::npos) {
    if (is_program(name)) return name;
    if (!fs::exists(name, ignored))
      throw_not_started("no program " + name + " in " + fs::current_path(ignored).string());
    throw_not_started(name + (fs::is_directory(name, ignored) ? " is a folder, not a program"
                                                              : " is not executable (chmod +x " + name + ")"));
  }
  std::string not_executable;
  for (size_t start = 0; !name.empty() && start <= search_path.size();) {
    const size_t end = std::min(search_path.find(':', start), search_path.size());
    const std::string folder = search_path.substr(start, end - start);
    const fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (is_program(candidate)) return candidate.string();
    if (not_executable.empty() && fs::is_regular_file(candidate, ignored)) not_executable = candidate.string();
    start = end + 1;
  }
  if (!not_executable.empty()) throw_not_started(not_executable + " is not executable");
  const std::string hint = is_program(fs::path(".") / name) ? "; did you mean ./" + name + "?" : "";
  throw_not_started("no program '" + name + "' in PATH (" + search_path + ")" + hint);
}

std::string default_run_dir(const std::string& program, std::chrono::system_clock::time_point now, int pid) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 32> stamp{};
  std::strftime(stamp.data(), stamp.size(), "%Y%m%d-%H%M%S", &local);
  return "runs/" + std::string(stamp.data()) + "-" + std::filesystem::path(program).filename().string() + "-" +
         std::to_string(pid);
}

namespace {

Placement place_on_nodes(const std::vector<NumaNode>& nodes, int rank, int ranks) {
  const int count = static_cast<int>(nodes.size());
  if (count < 2) return {};
  if (ranks >= count) {
    const NumaNode& node = nodes[static_cast<size_t>(int64_t{rank} * count / ranks)];
    return {node.cpus, node.number};
  }
  Placement several;
  for (int i = rank * count / ranks; i < (rank + 1) * count / ranks; ++i) {
    const NumaNode& node = nodes[static_cast<size_t>(i)];
    several.memory_node = several.cpus.empty() ? node.number : -1;
    several.cpus.insert(several.cpus.end(), node.cpus.begin(), node.cpus.end());
  }
  std::sort(several.cpus.begin(), several.cpus.end());
  return several;
}

}  // namespace

Placement place_rank(Binding bind, const std::vector<int>& cpus, const std::vector<NumaNode>& nodes, int rank,
                     int ranks) {
  if (bind == Binding::kNone) return {};
  if (bind == Binding::kNuma) return place_on_nodes(usable_nodes(nodes, cpus), rank, ranks);
  const auto share = static_cast<ptrdiff_t>(cpus.size()) / ranks;
  if (share == 0)
    throw LaunchError(kExitBadCommandLine, "--bind core: " + std::to_string(ranks) +
                                               " ranks cannot have one core each: only " + std::to_string(cpus.size()) +
                                               " may be used; leave out --bind");
  return {{cpus.begin() + rank * share, cpus.begin() + (rank + 1) * share}};
}

std::vector<NumaNode> usable_nodes(std::vector<NumaNode> nodes, const std::vector<int>& cpus) {
  for (auto& node : nodes)
    std::erase_if(node.cpus, [&](int cpu) { return !std::binary_search(cpus.begin(), cpus.end(), cpu); });
  std::erase_if(nodes, [](const NumaNode& node) { return node.cpus.empty(); });
  return nodes;
}

std::string oversubscription_warning(int ranks, int usable_cores, int threads_per_rank) {
  if (ranks <= usable_cores) return "";
  return std::to_string(ranks) + " ranks share " + std::to_string(usable_cores) +
         (usable_cores == 1 ? " usable core" : " usable cores") + "; each computes with " +
         std::to_string(threads_per_rank) + (threads_per_rank == 1 ? " thread" : " threads");
}

}  // namespace lockstep
