#include "hosts/coordinator.h"

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "base/processor.h"
#include "base/text.h"
#include "base/version.h"
#include "hosts/hosts_plan.h"
#include "hosts/hosts_team.h"
#include "hosts/keep_states.h"
#include "hosts/launch_command.h"
#include "hosts/machine_places.h"
#include "hosts/workplace.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"

namespace lockstep::hosts {
namespace {

constexpr std::chrono::seconds kMissingNoteEvery(5);
constexpr int kLaunchedInATurn = 8;
constexpr int kMostNamed = 8;  ///< machines in one message
/// Time for agents to say goodbye, and for the commands that started them to end.
constexpr std::chrono::seconds kFarewell(3);

void say(const TeamSetup& setup, const std::string& text) { setup.display.print("lockstep: " + text + "\n"); }

}  // namespace

Coordinator::Coordinator(const CoordinatorOptions& options, const Key& key)
    : options_(options), tls_(key, Side::kCoordinator), lobby_(tls_) {
  for (size_t i = 0; i < options.hosts.size(); ++i) {
    Node& node = nodes_.emplace_back();
    node.number = static_cast<int>(i);
    node.host = options.hosts[i];
    node.most_slots = node.host.slots;
  }
}

Coordinator::~Coordinator() { end(kExitNotStarted); }

std::unique_ptr<Team> Coordinator::start(const TeamSetup& setup, int restarts) {
  const auto& elastic = setup.options.elastic;
  if (elastic && shared_out_) share_out(setup.options.ranks);
  gather(setup);
  int world_size = 0;
  for (Node& node : nodes_) {
    node.first_rank = world_size;
    world_size += node.host.slots;
  }
  if (world_size > kMaxRanks)
    throw LaunchError(kExitNotStarted, "the machines offer " + std::to_string(world_size) +
                                           " ranks, and a run can have " + std::to_string(kMaxRanks) +
                                           " at most; give a smaller -n");
  if (elastic && !elastic->contains(world_size))
    throw LaunchError(kExitBadCommandLine, "the machines have " + std::to_string(world_size) +
                                               " ranks, but --elastic allows " + std::to_string(elastic->min) + " to " +
                                               std::to_string(elastic->max));
  shared_out_ = true;
  return std::make_unique<HostsTeam>(nodes_, lobby_, world_size, setup, restarts, options_.encryption);
}

void Coordinator::leave_out(int rank) {
  for (Node& node : nodes_)
    if (node.has_rank(rank)) node.leaves = true;
}

void Coordinator::share_out(int ranks) {
  std::vector<MachinePlaces> machines;
  for (const Node& node : nodes_)
    machines.push_back({.ranks = node.host.slots,
                        .most = node.gone ? 0 : node.most_slots,
                        .lost = node.is_lost(),
                        .leaves = node.leaves});
  const std::vector<int> shared = hosts::share_out(machines, ranks);
  for (Node& node : nodes_) {
    const auto number = static_cast<size_t>(node.number);
    node.host.slots = shared[number];
    node.leaves = false;
    if (!machines[number].lost || node.has_ranks()) continue;
    node.gone = true;
    node.lose();
  }
}

void Coordinator::open_door() {
  if (lobby_.door().is_open()) return;
  std::vector<std::string> names, addresses;
  for (const Host& host : options_.hosts) names.push_back(host.name);
  if (!options_.interface.empty())
    addresses = {address_on(options_.interface)};
  else
    addresses = options_.rendezvous ? addresses_of_rendezvous(options_.rendezvous->host) : addresses_towards(names);
  lobby_.door().open(addresses, options_.rendezvous ? options_.rendezvous->port : 0);
}

void Coordinator::gather(const TeamSetup& setup) {
  for (Node& node : nodes_)
    if (node.is_lost()) node.lose();
  const auto is_ready = [](const Node& node) { return !node.is_awaited(); };
  std::deque<Node*> unlaunched;
  if (!std::all_of(nodes_.begin(), nodes_.end(), is_ready)) {
    open_door();
    for (Node& node : nodes_)
      if (node.is_lost() && !comes_by_itself(node)) unlaunched.push_back(&node);
  }
  lobby_.door().expect(static_cast<size_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [&](const Node& one) { return !is_ready(one); })));
  const auto began = Clock::now();
  auto tell_at = began + kMissingNoteEvery;
  while (!are_all_ready(setup)) {
    const auto now = Clock::now();
    if (now - began >= options_.patience)
      throw LaunchError(
          kExitNotStarted,
          missing() + " did not arrive within " + std::to_string(options_.patience.count() / 1000) + " s; check that " +
              (options_.rendezvous ? "`lockstep run` was started there, with this rendezvous and key, and "
                                   : "the launch command works by hand, and ") +
              "that the firewall lets it reach " + lobby_.door().endpoints().front().text() +
              " (--interface chooses another network)");
    if (now >= tell_at) {
      say(setup, "waits for " + missing());
      tell_at += kMissingNoteEvery;
    }
    // A few at a time, so that the first need not wait for the last.
    for (int i = 0; i < kLaunchedInATurn && !unlaunched.empty(); ++i) {
      launch_agent(*unlaunched.front(), setup);
      unlaunched.pop_front();
    }
    turn(setup, unlaunched.empty() ? std::min(tell_at, began + options_.patience) : now);
  }
  lobby_.door().expect(0);
  compare(setup);
  // If agents connect by themselves, late ones are told why they are refused.
  if (!options_.rendezvous) lobby_.door().close();
}

void Coordinator::launch_agent(Node& node, const TeamSetup& setup) {
  std::string endpoints;
  for (const Endpoint& endpoint : lobby_.door().endpoints())
    endpoints += (endpoints.empty() ? "" : ",") + endpoint.text();
  const auto words = agent_words(options_, static_cast<size_t>(node.number), endpoints);
  node.process = std::make_unique<AgentProcess>(words, tls_.key(), setup.environment, setup.guard, setup.settings);
}

void Coordinator::turn(const TeamSetup& setup, Clock::time_point until) {
  PollSet polled;
  int signal = 0;
  polled.add(setup.settings.signal_fd(), POLLIN, [&](const pollfd&) {
    while (const int one = setup.settings.next_signal())
      if (one != SIGCONT) signal = one;
  });
  lobby_.watch(polled);
  for (Node& node : nodes_) {
    node.watch(polled);
    if (node.process) node.process->watch(polled);
    if (node.channel) until = std::min(until, node.channel->next_beat());
  }
  if (const auto due = lobby_.due()) until = std::min(until, *due);
  polled.wait(Deadline(until).remaining_ms());
  if (signal != 0) throw LaunchError(static_cast<ExitCode>(128 + signal), "stopped while it waited for " + missing());
  lobby_.tick();
  for (Arrival& arrival : lobby_.take_arrivals()) admit(std::move(arrival), setup);
  if (const std::string news = lobby_.take_news(); !news.empty()) say(setup, news);
  for (Node& node : nodes_) {
    take_replies(node);
    check_launched(node);
  }
}

std::string Coordinator::objection(const Hello& hello, const std::string& command) const {
  const int count = static_cast<int>(nodes_.size());
  if (hello.protocol != kProtocol || hello.version != library_version())
    return "it runs Lockstep " + printable(hello.version) + ", and the coordinator " + library_version() +
           "; install the same version on all machines";
  if (hello.joins) return "`lockstep join` is for runs with --islands, and this one has none; start it with --nnodes";
  if (hello.nodes != 0 && hello.nodes != count)
    return "it was started with --nnodes " + std::to_string(hello.nodes) + ", and the coordinator with " +
           std::to_string(count);
  if (hello.node < 0 || hello.node >= count)
    return "it was started with --node-rank " + std::to_string(hello.node) + ", but there are only " +
           std::to_string(count) + " machines, counted from 0";
  if (nodes_[static_cast<size_t>(hello.node)].gone)
    return "it was lost, and the run continues without it; this machine can join only another run";
  if (nodes_[static_cast<size_t>(hello.node)].channel)
    return "a node " + std::to_string(hello.node) + " has already joined from " +
           nodes_[static_cast<size_t>(hello.node)].host.name +
           "; give each machine its own --node-rank, and each run its own rendezvous";
  if (!hello.command.empty() && hello.command != command)
    return "it was started with another command: " + printable(hello.command) + " there, " + command + " here";
  if (hello.encrypt && !options_.encryption.is_on)
    return "it was started with --encrypt, and the coordinator without; give it on node 0, too";
  if (hello.slots < 0 || hello.slots > kMaxRanks) return "it offers an impossible number of ranks";
  return "";
}

void Coordinator::admit(Arrival arrival, const TeamSetup& setup) {
  const std::string why = objection(arrival.hello, command_text(setup.options.command));
  if (!why.empty()) {
    const std::string who = printable(arrival.hello.host) + " (" + arrival.channel->addresses().there + ")";
    say(setup, who + " cannot take part: " + why);
    return Lobby::send_away(*arrival.channel, kExitNotStarted, "this machine cannot take part: " + why);
  }
  Node& node = nodes_[static_cast<size_t>(arrival.hello.node)];
  node.channel = std::move(arrival.channel);
  if (comes_by_itself(node)) node.host = {printable(arrival.hello.host), std::max(arrival.hello.slots, 1)};
  node.most_slots = std::max(node.most_slots, node.host.slots);
  prepare(node, setup);
}

void Coordinator::prepare(Node& node, const TeamSetup& setup) const {
  std::error_code ignored;
  const bool own_place = comes_by_itself(node);
  node.channel->send(Kind::kPrepare, Prepare{.command = setup.options.command,
                                             .environment = own_place ? EnvironmentBlock() : setup.environment,
                                             .folder = own_place ? "" : std::filesystem::current_path(ignored).string(),
                                             .address = node.address,
                                             .run_dir = setup.folder,
                                             .keep_run_dir = !setup.options.run_dir.empty(),
                                             .slots = node.host.slots,
                                             .bind = static_cast<int>(setup.options.bind),
                                             .max_restarts = setup.options.max_restarts,
                                             .run_id = setup.run_id,
                                             .encrypt = options_.encryption.is_on,
                                             .link_port = options_.encryption.port});
}

/// If this machine has several addresses, its route to itself does not show how others reach it: its ranks use the
/// address to which an agent of another machine has connected.
bool Coordinator::are_all_ready(const TeamSetup& setup) {
  const auto is_awaited = [](const Node& node) { return node.is_awaited(); };
  if (std::any_of(nodes_.begin(), nodes_.end(), is_awaited)) return false;
  const auto elsewhere =
      std::find_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.channel && !node.is_here(); });
  if (!options_.interface.empty() || elsewhere == nodes_.end()) return true;
  const std::string address = elsewhere->channel->addresses().here;
  for (Node& node : nodes_) {
    if (!node.is_here() || node.ready->address == address || node.address == address) continue;
    node.address = address;
    node.ready.reset();
    prepare(node, setup);
  }
  return std::none_of(nodes_.begin(), nodes_.end(), is_awaited);
}

void Coordinator::take_replies(Node& node) {
  if (!node.channel) return;
  const auto now = Clock::now();
  try {
    while (const auto message = node.channel->next(kMaxFrameBytes)) {
      if (message->kind == Kind::kReady) node.ready = decode<Ready>(message->body);
      if (message->kind == Kind::kSignal)
        throw LaunchError(static_cast<ExitCode>(128 + decode<Number>(message->body).value % 64),
                          "stopped on " + node.host.name + " while it waited for " + missing());
      if (message->kind != Kind::kFailed) continue;
      const Failed failed = decode<Failed>(message->body);
      throw LaunchError(static_cast<ExitCode>(failed.exit_code), node.host.name + ": " + printable(failed.text));
    }
  } catch (const ProtocolError& error) {
    node.channel->close(error.what());
  }
  if (now - node.channel->last_heard() >= kSilence) node.channel->close("has not been heard of for 4 s");
  node.channel->beat(now);
  if (node.channel->state() == Channel::State::kClosed)
    throw_lost(node, kExitMachineLost,
               node.host.name + " was lost before the ranks were started: " + node.channel->reason());
}

/// In an elastic run, another start may do without the machine.
void Coordinator::throw_lost(Node& node, ExitCode code, const std::string& text) const {
  LaunchError error(code, text);
  error.from_outside = true;
  if (shared_out_) error.lost_ranks = node.host.slots;
  node.lose();
  throw error;
}

void Coordinator::check_launched(Node& node) const {
  if (!node.is_awaited() || !node.process || !node.process->end()) return;
  node.process->read_output();
  const std::string line = node.process->last_line(), last = line.empty() ? "it printed nothing" : printable(line);
  const ProcessEnd end = *node.process->end();
  const bool refused = end == ProcessEnd{ProcessEnd::Kind::kExited, kExitRefusedPeer};
  const auto words = options_.launch_command.empty() ? std::vector<std::string>{own_program(), "agent"}
                                                     : launch_words(options_.launch_command, node.host.name, {});
  const std::string text =
      "no agent on " + node.host.name + ": `" + command_text(words) + " ...` ended (" + describe(end) + "): " + last;
  if (end.kind == ProcessEnd::Kind::kSignalled) throw_lost(node, kExitNotStarted, text);
  throw LaunchError(refused ? kExitRefusedPeer : kExitNotStarted, text);
}

void Coordinator::compare(const TeamSetup& setup) const {
  const Node& first = *std::find_if(nodes_.begin(), nodes_.end(), std::mem_fn(&Node::is_ready));
  const bool loopback = is_loopback(first.ready->address);
  const std::string script = script_of(setup.options.command);
  std::vector<MachineProcessor> processors;
  for (const Node& node : nodes_) {
    if (node.gone) continue;
    const Ready& ready = *node.ready;
    if (ready.program_hash != first.ready->program_hash)
      throw LaunchError(kExitNotStarted, node.host.name + " has another " + setup.options.command[0] +
                                             (script.empty() ? "" : " or " + script) + " than " + first.host.name +
                                             " (SHA-256 " + ready.program_hash.substr(0, 12) + " and " +
                                             first.ready->program_hash.substr(0, 12) +
                                             "); copy the program to all machines");
    if (is_loopback(ready.address) != loopback)
      throw LaunchError(
          kExitNotStarted,
          node.host.name + " would use " + ready.address + ", and " + first.host.name + " " + first.ready->address +
              ", which cannot reach each other; choose with --interface a network that " + "all machines share");
    processors.push_back({node.host.name, ready.processor});
    for (const std::string& warning : ready.warnings) say(setup, node.host.name + ": " + printable(warning));
  }
  if (const std::string warning = warning_of_other_processors(processors); !warning.empty()) say(setup, warning);
}

std::string Coordinator::missing() const {
  std::string text;
  int count = 0;
  for (const Node& node : nodes_) {
    if (!node.is_awaited() || ++count > kMostNamed) continue;
    const bool named = !comes_by_itself(node);
    text += (text.empty() ? "" : ", ") + (named ? node.host.name : "node " + std::to_string(node.number));
  }
  if (count > kMostNamed) text += " and " + std::to_string(count - kMostNamed) + " more";
  return text + " of " + std::to_string(nodes_.size()) + " machines";
}

KeptState Coordinator::keep_state(const std::string& other_folder, bool is_sound) {
  return keep_states(nodes_, other_folder, is_sound);
}

void Coordinator::end(int exit_code) {
  if (over_) return;
  over_ = true;
  const std::string text = exit_code == kExitOk ? ""
                                                : "the run has ended with exit code " + std::to_string(exit_code) +
                                                      "; see the output of its coordinator for the reason";
  PollSet polled;
  const Deadline deadline(kFarewell);
  for (Node& node : nodes_)
    if (node.channel) node.channel->send(Kind::kOver, Over{.exit_code = exit_code, .text = text});
  const auto is_gone = [](const Node& node) {
    return (!node.channel || node.channel->state() == Channel::State::kClosed) &&
           (!node.process || node.process->end());
  };
  while (!std::all_of(nodes_.begin(), nodes_.end(), is_gone) && !deadline.passed()) {
    polled.clear();
    for (Node& node : nodes_) {
      if (node.channel && node.channel->state() != Channel::State::kClosed)
        polled.add(node.channel->fd(), node.channel->events(), [&node](const pollfd&) {
          node.channel->act();
          while (node.channel->next(kMaxFrameBytes)) continue;
        });
      if (node.process) node.process->watch(polled);
    }
    polled.wait(deadline.remaining_ms());
  }
  for (Node& node : nodes_) node.lose();
}

}  // namespace lockstep::hosts
