#include "hosts/islands.h"

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>

#include "base/text.h"
#include "base/version.h"
#include "hosts/hosts_plan.h"
#include "hosts/island_machine.h"
#include "hosts/launch_command.h"
#include "hosts/lobby.h"
#include "hosts/round_hub.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"
#include "launch/run_folder.h"

namespace lockstep::hosts {
namespace {

constexpr int kTickMs = 50;
constexpr int kTriesBeforeARound = 3;  // of a machine that was killed
constexpr std::chrono::seconds kLongestWait(30);
/// Without a channel, after which the command that has started a machine is given up: its machine may be gone.
constexpr std::chrono::seconds kOutOfReach(20);
/// At the end, for agents to end their ranks.
constexpr std::chrono::seconds kGoodbye(12);

using Machine = IslandMachine;

class IslandsRun {
 public:
  IslandsRun(const IslandsOptions& options, const Key& key, const EnvironmentBlock& environment);
  int run();

 private:
  RoundHub::Options hub_options();
  Prepare order_for(int number) const;
  void start(int number);
  void turn();
  void take_signals();
  void take_arrivals();
  void join(Arrival arrival);
  /// Why an agent that the run has started, or that connects again, is refused; empty: it is not.
  std::string objection(const Hello& hello) const;
  void show(int number);
  void look_at(int number);
  void take_end(int number, int exit_code, const std::string& how);
  bool may_start_again(Machine& machine) const;
  bool is_worth_a_try(int number);
  void end(int exit_code, const std::string& why);
  std::optional<int> exit_code() const;
  Machine& machine(int number) { return machines_[static_cast<size_t>(number)]; }
  const Machine& machine(int number) const { return machines_[static_cast<size_t>(number)]; }
  int count() const { return static_cast<int>(machines_.size()); }
  int counted(Machine::Phase phase) const {
    return static_cast<int>(
        std::count_if(machines_.begin(), machines_.end(), [&](const Machine& one) { return one.phase == phase; }));
  }
  static void tell(const std::string& text) { std::cerr << "lockstep: " << text << std::endl; }
  std::string name_of(int number) const {
    return "machine " + std::to_string(number) + " (" + printable(machine(number).name) + ")";
  }

  const IslandsOptions options_;
  const EnvironmentBlock environment_;
  const LauncherSettings settings_;
  const Guard guard_;
  const Tls tls_;
  const RunFolder folder_;
  std::ofstream rounds_;
  Lobby lobby_;
  RoundHub hub_;
  std::vector<Machine> machines_;
  std::string failure_;  ///< of the machine that was given up last
  int signal_ = 0;       ///< that ends the run at once
  bool asked_ = false;   ///< to save and leave
  bool ends_ = false;
};

std::string folder_of(const IslandsOptions& options) {
  LaunchOptions named;
  named.run_dir = options.run_dir;
  named.command = options.command;
  return run_dir_of(named);
}

IslandsRun::IslandsRun(const IslandsOptions& options, const Key& key, const EnvironmentBlock& environment)
    : options_(options),
      environment_(environment),
      tls_(key, Side::kCoordinator),
      folder_(folder_of(options), /*keep_if_empty=*/true, RunFolder::Use::kAlone),
      rounds_(folder_.path() + "/rounds.jsonl"),
      lobby_(tls_),
      hub_(hub_options()),
      machines_(static_cast<size_t>(options.most)) {
  std::vector<std::string> names;
  for (const Host& host : options_.machines.hosts) {
    machine(static_cast<int>(names.size())).name = host.name;
    machine(static_cast<int>(names.size())).phase = Machine::Phase::kPauses;
    names.push_back(host.name);
  }
  for (int number = static_cast<int>(names.size()); number < count(); ++number) hub_.give_up(number, false);
  const std::string& interface = options_.machines.interface;
  const std::optional<Endpoint>& rendezvous = options_.machines.rendezvous;
  const auto addresses = !interface.empty() ? std::vector{address_on(interface)}
                         : rendezvous       ? addresses_of_rendezvous(rendezvous->host)
                                            : addresses_towards(names);
  lobby_.door().open(addresses, rendezvous ? rendezvous->port : 0);
  if (!options_.key_file.empty())
    tell("other machines join by: lockstep join --coordinator " + lobby_.door().endpoints().front().text() +
         " --key-file " + options_.key_file);
  if (!rounds_) throw LaunchError(kExitStorage, "cannot write " + folder_.path() + "/rounds.jsonl");
}

RoundHub::Options IslandsRun::hub_options() {
  return {.islands = options_.most,
          .least = options_.least,
          .patience = options_.machines.patience,
          .deadline = options_.round_deadline,
          .tell = tell,
          .record = [this](const std::string& line) { rounds_ << line << std::endl; },
          .is_empty = [this](int number) { return machine(number).phase == Machine::Phase::kEmpty; },
          .ended = [this](int number, int exit_code) { machine(number).told_end = exit_code; },
          .problem = [this](int number, const std::string& text) { machine(number).problem = text; }};
}

Prepare IslandsRun::order_for(int number) const {
  const int slots = options_.machines.hosts.front().slots;  // all have as many
  Prepare order{.environment = environment_,
                .folder = std::filesystem::current_path().string(),
                .slots = count(),
                .island = number,
                .turn = machine(number).turn};
  order.run_dir = folder_.path() + "/machine_" + std::to_string(number);
  order.command = {"run", "-n", std::to_string(slots), "--run-dir", order.run_dir};
  order.command.insert(order.command.end(), options_.run_options.begin(), options_.run_options.end());
  order.command.emplace_back("--");
  order.command.insert(order.command.end(), options_.command.begin(), options_.command.end());
  return order;
}

void IslandsRun::start(int number) {
  std::string endpoints;
  for (const Endpoint& one : lobby_.door().endpoints()) endpoints += (endpoints.empty() ? "" : ",") + one.text();
  std::vector<std::string> words = {own_program(), "agent",   "--island", "yes",
                                    "--connect",   endpoints, "--node",   std::to_string(number)};
  Machine& one = machine(number);
  words = launch_words(options_.machines.launch_command, one.name, words);
  one.process = std::make_unique<AgentProcess>(words, tls_.key(), environment_, guard_, settings_);
  one.phase = Machine::Phase::kRuns;
  one.seen = Clock::now();
  ++one.starts;
  ++one.turn;
}

void IslandsRun::show(int number) {
  if (!machine(number).process) return;
  std::string text = machine(number).process->read_output();
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    std::cout << "[" << number << "] " << text.substr(0, end);
    text.erase(0, end);
  }
  std::cout.flush();
}

void IslandsRun::take_signals() {
  while (const int signal = settings_.next_signal()) {
    if (signal == SIGCONT) continue;
    const bool asks = (signal == SIGTERM || signal == SIGUSR1) && !asked_;
    if (!asks) {
      signal_ = signal;
      continue;
    }
    asked_ = true;
    tell("the machines are asked to save and leave");
    hub_.send_to_all(Kind::kAsk);
  }
}

void IslandsRun::take_arrivals() {
  lobby_.tick();
  for (Arrival& arrival : lobby_.take_arrivals()) join(std::move(arrival));
  if (const std::string news = lobby_.take_news(); !news.empty()) tell(news);
}

std::string IslandsRun::objection(const Hello& hello) const {
  if (hello.nodes != 0) return "it was started with --nnodes, and this is a run of --islands; use `lockstep join`";
  if (hello.node < 0 || hello.node >= count()) return "the run has no such machine";
  const Machine& one = machine(hello.node);
  const bool is_new = hello.turn < 0;
  if (one.phase != Machine::Phase::kRuns || (is_new ? one.has_joined : hello.turn != one.turn))
    return "another agent has its place, or the run does not await it any more";
  return "";
}

void IslandsRun::join(Arrival arrival) {
  const Hello& hello = arrival.hello;
  PlaceToJoin place{hello.node, ""};
  const bool is_new = hello.joins && hello.turn < 0;
  std::vector<IslandPlace> places;
  for (int number = 0; number < count(); ++number)
    places.push_back({machine(number).standing(hub_.is_connected(number)), machine(number).name});
  if (hello.protocol != kProtocol || hello.version != library_version())
    place.refusal = "it runs Lockstep " + printable(hello.version) + ", and the coordinator " + library_version();
  else if (is_new && (ends_ || asked_))
    place.refusal = "the run is ending";
  else if (is_new)
    place = place_to_join(hello.host, places);
  else
    place.refusal = objection(hello);
  if (!place.refusal.empty()) {
    tell(printable(hello.host) + " cannot take part: " + place.refusal);
    return Lobby::send_away(*arrival.channel, kExitNotStarted, "this machine cannot take part: " + place.refusal);
  }
  if (is_new) {
    show(place.number);
    machine(place.number).seat(hello.host);
    tell(name_of(place.number) + " joins the run");
  }
  arrival.channel->send(Kind::kPrepare, order_for(place.number));
  hub_.admit(place.number, std::move(arrival.channel), is_new);
}

void IslandsRun::turn() {
  const auto awaited = static_cast<size_t>(counted(Machine::Phase::kRuns));
  lobby_.door().expect(awaited - std::min(hub_.connected(), awaited));
  PollSet polled;
  polled.add(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  for (int number = 0; number < count(); ++number) {
    const Machine& one = machine(number);
    if (one.phase != Machine::Phase::kRuns || !one.process) continue;
    if (one.process->output_fd() >= 0)
      polled.add(one.process->output_fd(), POLLIN, [this, number](const pollfd&) { show(number); });
    one.process->watch(polled);
  }
  lobby_.watch(polled);
  hub_.watch(polled);
  const auto due = lobby_.due();
  polled.wait(due ? std::min(kTickMs, Deadline(*due).remaining_ms()) : kTickMs);
  take_arrivals();
  hub_.tick(Clock::now());
}

/// A program that has never come to a round would end by itself in the same way again, and one that is always killed
/// there needs no more than a few tries.
bool IslandsRun::is_worth_a_try(int number) {
  const Machine& one = machine(number);
  const bool was_killed =
      one.exit_code == kExitRankKilled || one.exit_code == kExitOutOfMemory || one.exit_code == kExitMachineLost;
  return hub_.has_come(number) || (was_killed && one.starts <= kTriesBeforeARound);
}

bool IslandsRun::may_start_again(Machine& one) const {
  const auto now = Clock::now();
  one.ends.push_back(now);
  while (now - one.ends.front() > std::chrono::hours(1)) one.ends.pop_front();
  return !asked_ && one.starts <= options_.max_restarts &&
         static_cast<int>(one.ends.size()) <= options_.restarts_per_hour;
}

void IslandsRun::take_end(int number, int exit_code, const std::string& how) {
  Machine& one = machine(number);
  one.exit_code = exit_code;
  one.process.reset();
  if (exit_code == 0) {
    one.phase = Machine::Phase::kFinished;
    hub_.give_up(number, /*finished=*/true);
    if (hub_.has_come(number)) return;
    one.exit_code = kExitBadCommandLine;
    return tell(name_of(number) +
                " finished and took part in no round: its program has no DiLoCo, and --islands does "
                "nothing for it; leave --islands out");
  }
  const std::string what = name_of(number) + " " + how + (one.problem.empty() ? "" : ": " + one.problem);
  if (one.has_joined) {
    one.phase = Machine::Phase::kGone;
    hub_.give_up(number, /*finished=*/false);
    return tell(what + "; `lockstep join` may take its place");
  }
  if (hub_.is_refused(number) || !is_worth_a_try(number) || !may_start_again(one)) {
    one.phase = Machine::Phase::kGone;
    hub_.give_up(number, /*finished=*/false);
    failure_ = what;
    return tell(what + (options_.goes_on_without ? "; it is not started again" : ""));
  }
  const auto pause =
      std::min<std::chrono::seconds>(kLongestWait, std::chrono::seconds(1LL << std::min(one.starts - 1, 5)));
  one.phase = Machine::Phase::kPauses;
  one.start_at = Clock::now() + pause;
  tell(what + "; it is started again in " + std::to_string(pause.count()) + " s");
}

void IslandsRun::look_at(int number) {
  Machine& one = machine(number);
  if (one.phase == Machine::Phase::kPauses && one.start_at <= Clock::now() && !asked_) return start(number);
  if (one.phase != Machine::Phase::kRuns) return;
  if (hub_.is_connected(number)) one.seen = Clock::now();
  if (one.told_end) return take_end(number, *one.told_end, "ended with " + std::to_string(*one.told_end));
  if (const auto end = one.process ? one.process->end() : std::nullopt) {
    show(number);
    if (end->kind == ProcessEnd::Kind::kSignalled)
      return take_end(number, kExitMachineLost, "is lost: its agent was ended by signal " + std::to_string(end->value));
    const int code = end->kind == ProcessEnd::Kind::kExited ? end->value : int{kExitNotStarted};
    return take_end(number, code, "ended with " + std::to_string(code));
  }
  const auto patience = hub_.has_come(number) ? Clock::duration(kOutOfReach) : options_.machines.patience;
  if (Clock::now() - one.seen > patience) {
    show(number);
    take_end(number, kExitMachineLost, "is out of reach");
  }
}

/// Empty: the run goes on.
std::optional<int> IslandsRun::exit_code() const {
  if (!hub_.mismatch().empty()) return kExitMismatch;
  const int gone = counted(Machine::Phase::kGone), finished = counted(Machine::Phase::kFinished);
  const int present = count() - counted(Machine::Phase::kEmpty);
  const auto failed = std::find_if(machines_.begin(), machines_.end(), [](const Machine& one) {
    return (one.phase == Machine::Phase::kGone || one.phase == Machine::Phase::kFinished) && one.exit_code != 0;
  });
  const bool all_ended = gone + finished == present || (asked_ && counted(Machine::Phase::kRuns) == 0);
  if (!asked_ && present - gone < options_.least) {
    if (!options_.goes_on_without) return failed->exit_code;
    tell("fewer than the " + std::to_string(options_.least) + " machines that --elastic demands are left");
    return kExitTooFewRanks;
  }
  if (!all_ended) return {};
  if (failed == machines_.end()) return asked_ && finished < present ? int{kExitPreemptedUnsaved} : int{kExitOk};
  // With --elastic the run is what those have made that are left.
  const bool is_lost = failed->phase == Machine::Phase::kGone && !asked_;
  return is_lost && finished > 0 ? int{kExitOk} : failed->exit_code;
}

void IslandsRun::end(int exit_code, const std::string& why) {
  ends_ = true;
  std::set<int> reached;
  for (int number = 0; number < count(); ++number)
    if (hub_.is_connected(number)) reached.insert(number);
  hub_.send_to_all(Kind::kOver, Over{.exit_code = exit_code, .text = why});
  const Deadline deadline(kGoodbye);
  while (counted(Machine::Phase::kRuns) > 0 && !deadline.passed()) {
    turn();
    for (int number = 0; number < count(); ++number) {
      Machine& one = machine(number);
      if (one.phase != Machine::Phase::kRuns) continue;
      const bool has_ended = one.process ? one.process->end().has_value() : !hub_.is_connected(number);
      if (!has_ended && reached.contains(number)) continue;
      show(number);
      one.process.reset();
      one.phase = Machine::Phase::kGone;
    }
  }
}

int IslandsRun::run() {
  std::optional<int> code;
  while (!code && signal_ == 0) {
    for (int number = 0; number < count(); ++number) look_at(number);
    code = exit_code();
    if (!code) turn();
  }
  const int result = code ? *code : 128 + signal_;
  end(result, !hub_.mismatch().empty() || result == kExitOk ? hub_.mismatch() : failure_);
  return result;
}

}  // namespace

int run_islands(const IslandsOptions& options, const Key& key, const EnvironmentBlock& environment) {
  return IslandsRun(options, key, environment).run();
}

}  // namespace lockstep::hosts
