#include "hosts_options.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "hosts/launch_command.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"

namespace lockstep {
namespace {

using hosts::AgentOptions;
using hosts::CoordinatorOptions;
using hosts::Host;

constexpr int kMostNodes = 4096;
constexpr int kSlurmPort = 29400, kSlurmPorts = 1000;
/// For machines that are started one after the other, by a user or a scheduler.
constexpr std::chrono::seconds kPatienceByHand(300);

[[noreturn]] void refuse_hosts(const std::string& text) { throw LaunchError(kExitBadCommandLine, text); }

std::string variable(const EnvironmentBlock& environment, const char* name) {
  return find_variable(environment, name, "");
}

/// How long to wait for machines: the ranks' time to join, if the user has set one.
std::chrono::milliseconds patience(const EnvironmentBlock& environment, std::chrono::milliseconds otherwise) {
  const std::string text = variable(environment, "LOCKSTEP_JOIN_TIMEOUT_S");
  return text.empty() ? otherwise : parse_seconds("LOCKSTEP_JOIN_TIMEOUT_S", text, false);
}

/// Whether srun has started `lockstep run` once on each of several machines.
bool is_slurm_step(const EnvironmentBlock& environment) {
  const std::string nodes = variable(environment, "SLURM_STEP_NUM_NODES");
  return !variable(environment, "SLURM_STEP_ID").empty() && !nodes.empty() && nodes != "1";
}

}  // namespace

void HostsOptions::add_to(CLI::App& app) {
  app.add_option("--hosts", hosts_, "Machines and their ranks; an agent is started on each")
      ->type_name("NODE1:4,NODE2:4");
  app.add_option("--hostfile", hostfile_, "The same from a file, as mpirun has it: a line `node1 slots=4` for each")
      ->type_name("FILE");
  app.add_option("--launch-command", launch_command_,
                 "The command that starts an agent on {host}; the agent's own command follows it")
      ->type_name("TEMPLATE")
      ->default_str(hosts::kDefaultLaunchCommand);
  app.add_option("--interface", interface_,
                 "The interface, address or network (10.0.0.0/24) that the machines use between them. Default: that "
                 "of the route to the coordinator")
      ->type_name("NAME");
  app.add_option("--nnodes", nodes_, "Number of machines, on each of which the user or a scheduler starts this command")
      ->type_name("M");
  app.add_option("--node-rank", node_, "With --nnodes: this machine's number; 0 has the coordinator")->type_name("R");
  app.add_option("--rendezvous", rendezvous_,
                 "With --nnodes: an address of machine 0 and a port that is free there. With --islands: of this "
                 "machine, for `lockstep join`; any port by default")
      ->type_name("HOST:PORT");
  app.add_option("--key-file", key_file_,
                 "With --nnodes: the key that the machines share; else LOCKSTEP_KEY_FILE. With --islands: the key of "
                 "machines that join")
      ->type_name("FILE");
  app.add_flag("--encrypt", encrypt_, "Encrypt what ranks send to other machines, by the run's key");
  app.add_option("--link-port", link_port_,
                 "With --encrypt: the port of each machine to which the others send; any by default")
      ->type_name("P");
  app.add_option("--relay", relay_,
                 "With --encrypt: the machine by which those send that cannot connect to each other, by its name")
      ->type_name("NODE");
}

bool HostsOptions::is_slurms(const EnvironmentBlock& environment) { return is_slurm_step(environment); }

bool HostsOptions::asked_for(const EnvironmentBlock& environment) const {
  if (nodes_ && *nodes_ == "1") return false;
  return hosts_ || hostfile_ || nodes_ || node_ || rendezvous_ || encrypt_ || link_port_ || relay_ ||
         is_slurm_step(environment);
}

HostsRequest HostsOptions::read(const EnvironmentBlock& environment, const std::vector<std::string>& command,
                                int& ranks, bool islands) const {
  if ((encrypt_ || link_port_ || relay_) && !hosts_ && !hostfile_ && !nodes_ && !rendezvous_ &&
      !is_slurm_step(environment))
    refuse_hosts("--encrypt is for runs on several machines; give --hosts, --hostfile or --nnodes");
  if (!hosts_ && !hostfile_) return started_by_hand(environment, command, ranks);
  if (hosts_ && hostfile_) refuse_hosts("--hosts and --hostfile cannot be used together; leave one out");
  if (nodes_ || node_ || (rendezvous_ && !islands))
    refuse_hosts(
        "--hosts starts the machines itself; --nnodes, --node-rank and --rendezvous are for machines that are "
        "started one by one, so leave out one or the other");
  HostsRequest request{.key_file = key_file_.value_or("")};
  CoordinatorOptions& coordinator = request.coordinator.emplace();
  coordinator.hosts = hosts_ ? hosts::parse_hosts(*hosts_, ranks) : hosts::read_hostfile(*hostfile_, ranks);
  coordinator.launch_command = launch_command_.value_or(hosts::kDefaultLaunchCommand);
  hosts::launch_words(coordinator.launch_command, "", {});  // refuses an invalid one
  coordinator.interface = interface_.value_or("");
  if (rendezvous_) coordinator.rendezvous = hosts::parse_endpoint("--rendezvous", *rendezvous_);
  coordinator.patience = patience(environment, coordinator.patience);
  encrypt(coordinator);
  ranks = 0;
  for (const Host& host : coordinator.hosts) ranks += host.slots;
  if (ranks > kMaxRanks) refuse_hosts("more than " + std::to_string(kMaxRanks) + " ranks were requested");
  return request;
}

void HostsOptions::encrypt(CoordinatorOptions& coordinator) const {
  if (link_port_ && !encrypt_) refuse_hosts("--link-port is the port of encrypted links; give --encrypt, too");
  if (relay_ && !encrypt_) refuse_hosts("--relay joins encrypted links; give --encrypt, too");
  const auto is_relay = [&](const Host& host) { return host.name == relay_; };
  if (relay_ && !coordinator.rendezvous && std::none_of(coordinator.hosts.begin(), coordinator.hosts.end(), is_relay))
    refuse_hosts("--relay " + *relay_ + " is none of the machines; give one by its name in --hosts");
  coordinator.encryption = {.is_on = encrypt_, .relay = relay_.value_or("")};
  if (link_port_) coordinator.encryption.port = parse_number("--link-port", *link_port_, 1, 65535);
}

HostsRequest HostsOptions::started_by_hand(const EnvironmentBlock& environment, const std::vector<std::string>& command,
                                           int& ranks) const {
  const bool slurm = is_slurm_step(environment);
  const auto value = [&](const std::optional<std::string>& given, const char* slurms, const char* option) {
    if (given) return *given;
    const std::string found = slurm ? variable(environment, slurms) : "";
    if (found.empty())
      refuse_hosts(std::string(option) + " is missing; --nnodes, --node-rank and --rendezvous belong together");
    return found;
  };
  const std::string count = value(nodes_, "SLURM_STEP_NUM_NODES", "--nnodes");
  const int nodes = parse_number("--nnodes", count, 1, kMostNodes);
  if (slurm && !nodes_ && variable(environment, "SLURM_STEP_NUM_TASKS") != count)
    refuse_hosts(
        "Slurm has started this command " + variable(environment, "SLURM_STEP_NUM_TASKS") + " times on " + count +
        " machines; start it once on each (srun --ntasks-per-node=1), or give --nnodes 1 for independent runs");
  const int node = parse_number("--node-rank", value(node_, "SLURM_NODEID", "--node-rank"), 0, nodes - 1);
  std::string where = rendezvous_.value_or("");
  if (where.empty() && slurm) {
    std::string list = variable(environment, "SLURM_STEP_NODELIST");
    if (list.empty()) list = variable(environment, "SLURM_JOB_NODELIST");
    const int step = std::atoi(variable(environment, "SLURM_JOB_ID").c_str()) +
                     std::atoi(variable(environment, "SLURM_STEP_ID").c_str());
    where = hosts::parse_slurm_nodes(list).front() + ":" + std::to_string(kSlurmPort + std::abs(step) % kSlurmPorts);
  }
  if (where.empty()) refuse_hosts("--rendezvous is missing: an address of machine 0 and a port that is free there");
  HostsRequest request{.key_file = key_file_.value_or(variable(environment, "LOCKSTEP_KEY_FILE"))};
  if (request.key_file.empty())
    throw LaunchError(
        kExitRefusedPeer,
        "there is no key: give the same --key-file (or LOCKSTEP_KEY_FILE) on all machines, such as a file "
        "in a home folder that they share; make it with: (umask 077; openssl rand -hex 32 > FILE)");
  const hosts::Endpoint rendezvous = hosts::parse_endpoint("--rendezvous", where);
  if (node > 0) {
    request.agent = AgentOptions{.coordinators = {rendezvous},
                                 .node = node,
                                 .interface = interface_.value_or(""),
                                 .patience = patience(environment, kPatienceByHand),
                                 .by_hand = true,
                                 .nodes = nodes,
                                 .slots = ranks,
                                 .command = hosts::command_text(command),
                                 .encrypt = encrypt_};
    return request;
  }
  CoordinatorOptions& coordinator = request.coordinator.emplace();
  coordinator.hosts.assign(static_cast<size_t>(nodes), Host{.name = "", .slots = ranks});
  for (int i = 0; i < nodes; ++i) coordinator.hosts[static_cast<size_t>(i)].name = "node " + std::to_string(i);
  coordinator.rendezvous = rendezvous;
  coordinator.interface = interface_.value_or("");
  coordinator.patience = patience(environment, kPatienceByHand);
  encrypt(coordinator);
  ranks = std::min(ranks * nodes, kMaxRanks);
  return request;
}

}  // namespace lockstep
