#include "hosts/islands.h"

#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include "base/shell_word.h"
#include "hosts/addresses.h"
#include "hosts/agent_process.h"
#include "hosts/launch_command.h"
#include "hosts/round_hub.h"
#include "launch/launch_error.h"
#include "launch/process/own_program.h"
#include "launch/run_folder.h"

namespace lockstep::hosts {
namespace {

constexpr int kTickMs = 50;
constexpr std::chrono::seconds kLongestPause(30);

struct Machine {
  enum class Phase { kRuns, kPauses, kFinished, kGone };
  Phase phase = Phase::kPauses;
  std::unique_ptr<AgentProcess> process;
  int starts = 0;
  int exit_code = 0;
  Clock::time_point start_at = Clock::now();
};

class IslandsRun {
 public:
  IslandsRun(const IslandsOptions& options, const EnvironmentBlock& environment);
  int run();

 private:
  RoundHub::Options hub_options();
  std::vector<std::string> words_for(int number) const;
  void start(int number);
  void watch(PollSet& polled);
  void show(int number);
  void take_end(int number);
  std::optional<int> exit_code() const;
  int counted(Machine::Phase phase) const {
    return static_cast<int>(std::count_if(machines_.begin(), machines_.end(),
                                          [&](const Machine& one) { return one.phase == phase; }));
  }
  static void tell(const std::string& text) { std::cerr << "lockstep: " << text << std::endl; }
  std::string name_of(int number) const {
    return "machine " + std::to_string(number) + " (" + options_.hosts[static_cast<size_t>(number)].name + ")";
  }

  const IslandsOptions& options_;
  const EnvironmentBlock& environment_;
  const LauncherSettings settings_;
  const Guard guard_;
  const Key key_ = Key::generate();
  const RunFolder folder_;
  std::ofstream rounds_;
  RoundHub hub_;
  std::vector<Machine> machines_;
};

std::vector<std::string> hub_addresses(const IslandsOptions& options) {
  if (!options.interface.empty()) return {address_on(options.interface)};
  std::vector<std::string> names;
  for (const Host& host : options.hosts) names.push_back(host.name);
  return addresses_towards(names);
}

std::string run_dir_for(const IslandsOptions& options) {
  LaunchOptions named;
  named.run_dir = options.run_dir;
  named.command = options.command;
  return run_dir_of(named);
}

IslandsRun::IslandsRun(const IslandsOptions& options, const EnvironmentBlock& environment)
    : options_(options),
      environment_(environment),
      folder_(run_dir_for(options), /*keep_if_empty=*/true, RunFolder::Use::kAlone),
      rounds_(folder_.path() + "/rounds.jsonl"),
      hub_(hub_addresses(options), hub_options()),
      machines_(options.hosts.size()) {}

RoundHub::Options IslandsRun::hub_options() {
  return {.key = key_.text(),
          .islands = static_cast<int>(options_.hosts.size()),
          .least = options_.least,
          .deadline = options_.round_deadline,
          .tell = tell,
          .record = [this](const std::string& line) { rounds_ << line << std::endl; }};
}

std::vector<std::string> IslandsRun::words_for(int number) const {
  const Host& host = options_.hosts[static_cast<size_t>(number)];
  const std::string island = std::to_string(number) + "/" + std::to_string(options_.hosts.size());
  // The key comes over stdin, since other users see the words.
  std::vector<std::string> words = {
      "sh",
      "-c",
      "cd " + shell_word(std::filesystem::current_path().string()) +
          " && IFS= read -r LOCKSTEP_ISLAND_KEY && export LOCKSTEP_ISLAND_KEY && exec \"$0\" \"$@\"",
      "env",
      "LOCKSTEP_ISLAND=" + island + "@" + hub_.endpoints(),
      own_program(),
      "run",
      "-n",
      std::to_string(host.slots),
      "--run-dir",
      folder_.path() + "/machine_" + std::to_string(number)};
  words.insert(words.end(), options_.run_options.begin(), options_.run_options.end());
  words.emplace_back("--");
  words.insert(words.end(), options_.command.begin(), options_.command.end());
  return launch_words(options_.launch_command, host.name, words);
}

void IslandsRun::start(int number) {
  Machine& machine = machines_[static_cast<size_t>(number)];
  machine.process = std::make_unique<AgentProcess>(words_for(number), key_, environment_, guard_, settings_);
  machine.phase = Machine::Phase::kRuns;
  ++machine.starts;
}

void IslandsRun::show(int number) {
  std::string text = machines_[static_cast<size_t>(number)].process->read_output();
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    std::cout << "[" << number << "] " << text.substr(0, end);
    text.erase(0, end);
  }
  std::cout.flush();
}

void IslandsRun::watch(PollSet& polled) {
  for (int number = 0; number < static_cast<int>(machines_.size()); ++number) {
    const Machine& machine = machines_[static_cast<size_t>(number)];
    if (machine.phase != Machine::Phase::kRuns) continue;
    if (machine.process->output_fd() >= 0)
      polled.add(machine.process->output_fd(), POLLIN, [this, number](const pollfd&) { show(number); });
    machine.process->watch(polled);
  }
  hub_.watch(polled);
}

void IslandsRun::take_end(int number) {
  Machine& machine = machines_[static_cast<size_t>(number)];
  show(number);
  const ProcessEnd end = *machine.process->end();
  machine.exit_code = end.kind == ProcessEnd::Kind::kSignalled ? 128 + end.value
                      : end.kind == ProcessEnd::Kind::kExited  ? end.value
                                                               : kExitNotStarted;
  machine.process.reset();
  if (machine.exit_code == 0) {
    machine.phase = Machine::Phase::kFinished;
    if (hub_.has_come(number)) return;
    machine.exit_code = kExitBadCommandLine;
    return tell(name_of(number) + " finished and took part in no round: its program has no DiLoCo, and --islands does "
                                  "nothing for it; leave --islands out");
  }
  const std::string what = name_of(number) + " ended with " + std::to_string(machine.exit_code);
  if (machine.starts > options_.max_restarts) {
    machine.phase = Machine::Phase::kGone;
    hub_.give_up(number);
    return tell(what + "; the others go on without it");
  }
  const auto pause = std::min<std::chrono::seconds>(kLongestPause, std::chrono::seconds(1LL << std::min(machine.starts - 1, 5)));
  machine.phase = Machine::Phase::kPauses;
  machine.start_at = Clock::now() + pause;
  tell(what + "; it is started again in " + std::to_string(pause.count()) + " s");
}

/// Empty: the run goes on.
std::optional<int> IslandsRun::exit_code() const {
  const int gone = counted(Machine::Phase::kGone), finished = counted(Machine::Phase::kFinished);
  const int all = static_cast<int>(machines_.size());
  if (all - gone < options_.least) {
    tell("fewer than the " + std::to_string(options_.least) + " machines that --islands demands are left");
    return kExitTooFewRanks;
  }
  if (gone + finished < all) return {};
  const auto apart = std::find_if(machines_.begin(), machines_.end(), [](const Machine& one) {
    return one.phase == Machine::Phase::kFinished && one.exit_code != 0;
  });
  return apart == machines_.end() ? int{kExitOk} : apart->exit_code;
}

int IslandsRun::run() {
  for (;;) {
    for (int number = 0; number < static_cast<int>(machines_.size()); ++number) {
      Machine& machine = machines_[static_cast<size_t>(number)];
      if (machine.phase == Machine::Phase::kRuns && machine.process->end()) take_end(number);
      if (machine.phase == Machine::Phase::kPauses && machine.start_at <= Clock::now()) start(number);
    }
    if (const auto code = exit_code()) return *code;
    PollSet polled;
    int signal = 0;
    polled.add(settings_.signal_fd(), POLLIN, [&](const pollfd&) {
      while (const int one = settings_.next_signal())
        if (one != SIGCONT) signal = one;
    });
    watch(polled);
    polled.wait(kTickMs);
    if (signal != 0) return 128 + signal;
    hub_.tick();
  }
}

}  // namespace

int run_islands(const IslandsOptions& options, const EnvironmentBlock& environment) {
  return IslandsRun(options, environment).run();
}

}  // namespace lockstep::hosts
