#include "hosts/hosts_plan.h"

#include <sstream>

#include "hosts/launch_command.h"
#include "launch/process/own_program.h"

namespace lockstep::hosts {
namespace {

std::string ranks_text(int first, int count) {
  if (count == 1) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + " to " + std::to_string(first + count - 1);
}

}  // namespace

std::vector<std::string> agent_words(const CoordinatorOptions& options, size_t node, const std::string& endpoints) {
  std::vector<std::string> words = {own_program(), "agent", "--connect", endpoints, "--node", std::to_string(node)};
  if (!options.interface.empty()) words.insert(words.end(), {"--interface", options.interface});
  if (options.launch_command.empty()) return words;
  return launch_words(options.launch_command, options.hosts.at(node).name, words);
}

std::string describe_hosts(const CoordinatorOptions& options, const std::vector<std::string>& command) {
  std::ostringstream text;
  int first = 0;
  for (size_t node = 0; node < options.hosts.size(); ++node) {
    const Host& host = options.hosts[node];
    text << host.name << ": ";
    if (!options.rendezvous) {
      text << ranks_text(first, host.slots) << "\n  agent       "
           << command_text(agent_words(options, node, "ADDRESS:PORT"));
      first += host.slots;
    } else if (node == 0) {
      text << ranks_text(0, host.slots) << "\n  listens     " << options.rendezvous->text();
    } else {
      text << "ranks by its own -n\n  agent       `lockstep run` with --node-rank " << node
           << ", started there by hand or by a scheduler";
    }
    text << "\n";
  }
  text << "all ranks\n  command     " << command_text(command) << "\n";
  return text.str();
}

std::string describe_agent(const AgentOptions& options, const std::vector<std::string>& command) {
  std::ostringstream text;
  text << "node " << options.node << " of " << options.nodes << ": " << options.slots
       << (options.slots == 1 ? " rank" : " ranks") << "\n  joins       " << options.coordinators.front().text()
       << "\n  command     " << command_text(command) << "\n";
  return text.str();
}

}  // namespace lockstep::hosts
