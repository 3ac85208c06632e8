#include "run_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <optional>

#include "empty_values.h"
#include "help_text.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "nearest_name.h"

namespace lockstep {

const char* const kRunUsage =
    "Usage: lockstep run [-n N|auto] [--elastic MIN:MAX] [--max-restarts K]\n"
    "                    [--restarts-per-hour K] [--log-dir DIR] [--tee all|0|1,2]\n"
    "                    [--grace S] [--hang-timeout S|off] [--env NAME=VALUE]\n"
    "                    [--bind none|core|numa] [--virtual-ranks V]\n"
    "                    [--debugger RANK] [--dry-run]\n"
    "                    [--hosts NODE1:4,NODE2:4 | --hostfile FILE]\n"
    "                    [--launch-command TEMPLATE] [--interface NAME]\n"
    "                    [--islands [--elastic MIN[:MAX]] [--round-deadline S]]\n"
    "                    [--nnodes M --node-rank R --rendezvous HOST:PORT]\n"
    "                    [--key-file FILE] [--encrypt [--link-port P] [--relay NODE]]\n"
    "                    [--] PROGRAM [ARGS...]\n";

namespace {

constexpr const char* kFooter = R"(
The output of rank 0, or of the ranks of --tee, is shown here; that of every
rank is kept in DIR/rank_<n>.log. Rank 0 gets the input. When a rank fails, the
launcher stops the others and reports the first failure.

Exit codes (`lockstep explain CODE` says what to do):
   0  all ranks ended with 0            47  authentication was refused
   2  bad command line                  48  the run folder cannot be used
  40  a rank failed by itself           49  data or a checkpoint was refused
  41  a rank was killed by a signal     50  a limit of the system was reached
  42  a rank was killed for memory      51  fewer ranks than --elastic demands
  43  the ranks made no progress        52  a machine was lost
  44  the collectives do not match      60  preempted; the state was saved
  45  the replicas diverged             61  preempted; the state was not saved
  46  the program could not be started  70  a bug in the launcher
  128 + n  the launcher was stopped by SIGINT or SIGHUP, signal n (130: Ctrl-C)
A failure is reported in one block and in DIR/report.json, and what happens is
written to DIR/events.jsonl as it happens. SIGTERM and SIGUSR1 ask the ranks to
save and leave.
)";

constexpr int kMaxRestarts = 1000;
constexpr int kMaxVirtualRanks = 65536;
constexpr int kMostMachines = 4096;
constexpr const char* kElasticRestartsPerHour = "10";

/// CLI11 cannot describe "the rest is a command".
class RunFormatter : public HelpFormatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override { return kRunUsage; }
};

/// The options' values, as written.
struct Words {
  // Optional, so that an empty text is refused, not taken as absent.
  std::optional<std::string> ranks, restarts, per_hour, elastic, virtual_ranks, round_deadline;
  std::string tee = "0", grace = "5", hang_timeout = "300", bind = "none", debugger;
  std::vector<std::string> variables;
  bool islands = false, ignored = false;
  HostsOptions hosts;
};

void add_options(CLI::App& app, RunRequest& request, Words& words) {
  app.add_option("-n,--nproc-per-node,--np", words.ranks,
                 "Number of ranks. auto (torchrun: cpu): one for each usable core; gpu: one for each GPU")
      ->type_name("N|auto|gpu")
      ->default_str("1");
  app.add_option("--max-restarts", words.restarts, "Maximum number of restarts after a failure, in total")
      ->type_name("K")
      ->default_str("0");
  app.add_option("--restarts-per-hour", words.per_hour,
                 "Maximum number of restarts within an hour; without --max-restarts there is no other limit")
      ->type_name("K");
  app.add_option(
         "--elastic", words.elastic,
         "Continue with fewer ranks, down to MIN, when one fails twice at its place or is asked to leave, and with as "
         "many as `lockstep resize` asks for, up to MAX. Starts with -n, or MAX, ranks; at most 10 restarts "
         "within an hour, unless --max-restarts or --restarts-per-hour set another limit. With --islands: the "
         "machines that must be left, and those that there may be, with MAX, as others join")
      ->type_name("MIN:MAX");
  app.add_option("--log-dir,--run-dir", request.options.run_dir,
                 "Folder for the run's files. Default: runs/<time>-<program>-<pid>, removed if it stays empty")
      ->type_name("DIR");
  app.add_option("-t,--tee", words.tee, "Ranks whose output is shown here: all, or a list such as 0 or 1,2")
      ->type_name("all|RANKS")
      ->capture_default_str();
  app.add_option("--grace", words.grace, "Seconds between asking the ranks to stop and killing them")
      ->type_name("S")
      ->capture_default_str();
  app.add_option("--hang-timeout", words.hang_timeout, "Seconds without progress before a run is ended as hung, or off")
      ->type_name("S|off")
      ->capture_default_str();
  app.add_option("--env", words.variables, "NAME=VALUE for the environment of all ranks; may be repeated")
      ->type_name("NAME=VALUE")
      ->allow_extra_args(false);
  app.add_option(
         "--bind", words.bind,
         "none: a rank runs on any core. core: each has an equal share of the cores to itself, so that the kernel "
         "does not put two ranks on one core when other programs are busy. numa: a rank runs on the cores "
         "of one NUMA node and takes its memory there")
      ->type_name("none|core|numa")
      ->capture_default_str();
  app.add_option("--virtual-ranks", words.virtual_ranks,
                 "A number that ranks share out among themselves, so that the run gives the same bits on any number of "
                 "them")
      ->type_name("V");
  app.add_option("--debugger", words.debugger, "Run this rank under gdb, or else lldb, on the terminal")
      ->type_name("RANK");
  words.hosts.add_to(app);
  app.add_flag(
      "--islands", words.islands,
      "With --hosts: each machine is a run of its own, of a program that trains by DiLoCo. With --elastic MIN the "
      "others go on without one that is lost, as long as MIN machines are left, and it comes back");
  app.add_option("--round-deadline", words.round_deadline,
                 "With --islands: seconds after the first machine's contribution to a round until it is closed without "
                 "those that are missing. Default: it waits for all that live")
      ->type_name("S");
  app.add_flag("--dry-run", request.dry_run, "Print what each rank would run, and start nothing");
  app.add_flag("--standalone,--no-python", words.ignored, "Accepted because torchrun has them; no effect");
}

[[noreturn]] void refuse(const std::string& text) { throw LaunchError(kExitBadCommandLine, text); }

/// Rewrites mpirun's -np, which would be -n with the value "p": "-np" -> "--np", "-np4" -> "--np=4". Other words are
/// unchanged.
std::string without_mpis_np(const std::string& word) {
  if (!word.starts_with("-np")) return word;
  const std::string value = word.substr(3);
  if (value.empty() || value[0] == '=') return "--np" + value;
  const bool fits = std::isdigit(static_cast<unsigned char>(value[0])) != 0 || value == "auto" || value == "gpu";
  if (!fits) refuse("there is no option " + word + "; write -np N");
  return "--np=" + value;
}

/// "--max_restarts=1" -> "--max-restarts=1".
std::string with_dashes(const std::string& written) {
  const std::string word = without_mpis_np(written);
  if (!word.starts_with("--")) return word;
  std::string result = word;
  std::replace(result.begin(), result.begin() + static_cast<ptrdiff_t>(std::min(word.find('='), word.size())), '_',
               '-');
  return result;
}

/// A hint for torchrun's options that have no meaning here, better than "not expected".
std::string hint_for(const std::string& word) {
  for (const char* name : {"--rdzv", "--master-addr", "--master-port"})
    if (word.starts_with(name))
      return "; ranks on one machine need no address, and several machines meet by --hosts, or by --rendezvous "
             "HOST:PORT";
  return "";
}

/// "-n" of "-n4", "--tee" of "--tee=all".
std::string option_name(const std::string& word) {
  return word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
}

/// The option that `word` begins with. `seen` has the earlier ones, as written.
const CLI::Option& find_option(const CLI::App& app, const std::string& word,
                               std::map<const CLI::Option*, std::string>& seen) {
  const std::string name = option_name(word);
  const CLI::Option* option = app.get_option_no_throw(name);
  if (option == nullptr) {
    std::vector<std::string> known;
    for (const CLI::Option* one : app.get_options())
      for (const std::string& long_name : one->get_lnames()) known.push_back("--" + long_name);
    const std::string hint = hint_for(word);
    refuse("there is no option " + name + (hint.empty() ? did_you_mean(name, known) : hint));
  }
  const auto [before, is_new] = seen.emplace(option, name);
  const bool may_repeat = name == "--env" || option->get_items_expected_max() == 0;
  if (!is_new && !may_repeat)
    refuse(name + (before->second == name ? " is given twice" : " and " + before->second + " are the same option") +
           "; leave one out");
  return *option;
}

/// Takes the program and its arguments out of `words`, unchanged; in the options before them "_" becomes "-".
std::vector<std::string> take_command(const CLI::App& app, std::vector<std::string>& words) {
  size_t start = 0;
  std::map<const CLI::Option*, std::string> seen;
  while (start < words.size() && words[start] != "--" && words[start].starts_with('-') && words[start] != "-") {
    words[start] = with_dashes(words[start]);
    const CLI::Option& option = find_option(app, words[start], seen);
    const bool value_follows = option.get_items_expected_max() > 0 && option_name(words[start]) == words[start];
    start += value_follows ? 2 : 1;
  }
  start = std::min(start, words.size());
  const size_t end = start;
  if (start < words.size() && words[start] == "--") ++start;
  std::vector<std::string> command(words.begin() + static_cast<ptrdiff_t>(start), words.end());
  words.resize(end);
  return command;
}

Binding parse_binding(const std::string& text) {
  if (text == "none") return Binding::kNone;
  if (text == "core") return Binding::kCore;
  if (text == "numa") return Binding::kNuma;
  refuse("--bind takes none, core or numa; it got '" + text + "'" + did_you_mean(text, {"none", "core", "numa"}));
}

void read_restarts(const Words& words, LaunchOptions& options) {
  std::optional<std::string> per_hour = words.per_hour;
  if (words.elastic && !words.restarts && !per_hour) per_hour = kElasticRestartsPerHour;
  if (per_hour) options.restarts_per_hour = parse_number("--restarts-per-hour", *per_hour, 0, kMaxRestarts);
  if (words.restarts)
    options.max_restarts = parse_number("--max-restarts", *words.restarts, 0, kMaxRestarts);
  else if (per_hour)
    options.max_restarts = kAnyNumber;
}

/// "2" or "2:8": machines.
void read_elastic_islands(const std::string& text, int count, hosts::IslandsOptions& islands) {
  const size_t colon = text.find(':');
  islands.least = parse_number("--elastic", text.substr(0, colon), 1, count);
  if (colon != std::string::npos)
    islands.most = parse_number("--elastic", text.substr(colon + 1), count, kMostMachines);
}

/// Makes `request` one of --islands. REQUIRES: its hosts are read.
void read_islands(const Words& words, RunRequest& request) {
  if (!request.hosts || !request.hosts->coordinator || request.hosts->coordinator->launch_command.empty())
    refuse("--islands needs --hosts or --hostfile, since it starts the machines itself");
  const hosts::CoordinatorOptions& on = *request.hosts->coordinator;
  const std::pair<const char*, bool> others[] = {{"--virtual-ranks", words.virtual_ranks.has_value()},
                                                 {"--dry-run", request.dry_run},
                                                 {"--link-port", on.encryption.port != 0},
                                                 {"--relay", !on.encryption.relay.empty()}};
  for (const auto& [name, given] : others)
    if (given) refuse(std::string("--islands and ") + name + " cannot be used together; leave one out");
  for (const hosts::Host& host : on.hosts)
    if (host.slots != on.hosts.front().slots)
      refuse("--islands needs as many ranks on each machine; " + on.hosts.front().name + " has " +
             std::to_string(on.hosts.front().slots) + ", and " + host.name + " has " + std::to_string(host.slots));
  const int count = static_cast<int>(on.hosts.size());
  hosts::IslandsOptions& islands = request.islands.emplace();
  islands.machines = on;
  islands.run_dir = request.options.run_dir;
  islands.command = request.options.command;
  islands.max_restarts = request.options.max_restarts;
  islands.restarts_per_hour = request.options.restarts_per_hour;
  islands.goes_on_without = words.elastic.has_value();
  islands.least = islands.most = count;
  if (words.elastic) read_elastic_islands(*words.elastic, count, islands);
  islands.key_file = request.hosts->key_file;
  if (islands.key_file.empty() && (islands.most > count || on.rendezvous))
    refuse(
        "machines that join need the run's key; give --key-file FILE, made by (umask 077; openssl rand -hex 32 > "
        "FILE)");
  if (words.round_deadline) islands.round_deadline = parse_seconds("--round-deadline", *words.round_deadline, false);
  islands.run_options = {"--grace", words.grace, "--hang-timeout", words.hang_timeout,
                         "--bind",  words.bind,  "--tee",          words.tee};
  for (const std::string& variable : words.variables)
    islands.run_options.insert(islands.run_options.end(), {"--env", variable});
  request.hosts.reset();
}

void read_words(const Words& words, int usable_cores, int gpus, const EnvironmentBlock& environment,
                RunRequest& request) {
  LaunchOptions& options = request.options;
  if (words.elastic && !words.islands) options.elastic = parse_range("--elastic", *words.elastic);
  const int most = options.elastic ? options.elastic->max : 1;
  const bool on_hosts = words.hosts.asked_for(environment);
  const int without = on_hosts ? 1 : most;  // on each machine
  options.ranks = !words.ranks ? without : parse_rank_count("-n", *words.ranks, usable_cores, gpus);
  if (on_hosts) {
    // The terminal belongs to the launcher's machine. Ranks have none, nor, over ssh, have their agents.
    if (!words.debugger.empty())
      refuse(
          "--debugger works on one machine only; on several a rank starts the debugger itself, or one is attached to "
          "it (lockstep explain debugger)");
    if (!words.ranks && HostsOptions::is_slurms(environment)) options.ranks = usable_cores;
    request.hosts = words.hosts.read(environment, options.command, options.ranks, words.islands);
  }
  // Machines that connect by themselves then tell their numbers of ranks.
  const bool ranks_known =
      !request.hosts || (request.hosts->coordinator && !request.hosts->coordinator->launch_command.empty());
  if (options.elastic && ranks_known && !options.elastic->contains(options.ranks))
    refuse((on_hosts ? std::string("the machines have ") : "-n asks for ") + std::to_string(options.ranks) +
           " ranks, but --elastic allows " + std::to_string(options.elastic->min) + " to " + std::to_string(most));
  options.bind = parse_binding(words.bind);
  read_restarts(words, options);
  options.grace = parse_seconds("--grace", words.grace, false);
  options.hang_timeout = parse_seconds("--hang-timeout", words.hang_timeout, true);
  options.shown_ranks = parse_ranks("--tee", words.tee, ranks_known ? std::max(options.ranks, most) : kMaxRanks);
  for (const auto& variable : words.variables) check_variable("--env", variable);
  request.variables = words.variables;
  if (words.virtual_ranks) {
    const int count =
        parse_number("--virtual-ranks", *words.virtual_ranks, std::max(options.ranks, most), kMaxVirtualRanks);
    request.variables.push_back("LOCKSTEP_VIRTUAL_RANKS=" + std::to_string(count));
  }
  if (words.islands) return read_islands(words, request);
  if (words.round_deadline) refuse("--round-deadline belongs to --islands; leave it out, or give both");
  if (words.debugger.empty()) return;
  options.debugged_rank = parse_number("--debugger", words.debugger, 0, options.ranks - 1);
  options.hang_timeout = kNever;
  std::erase(options.shown_ranks, *options.debugged_rank);
  if (options.elastic) refuse("--debugger and --elastic cannot be used together; leave one out");
  if (options.max_restarts > 0) refuse("--debugger and --max-restarts cannot be used together; leave one out");
}

/// The description, and the variables that it sets.
struct Description {
  Description() {
    app.formatter(std::make_shared<RunFormatter>());
    app.footer(kFooter);
    add_options(app, request, words);
  }

  RunRequest request;
  Words words;
  CLI::App app{"Start a program as several ranks, on this machine or on several", "lockstep run"};
};

}  // namespace

std::shared_ptr<const CLI::App> describe_run_command() {
  const auto description = std::make_shared<Description>();
  return {description, &description->app};
}

RunRequest parse_run_command(std::vector<std::string> words, int usable_cores, int gpus,
                             const EnvironmentBlock& environment) {
  Description description;
  auto& [request, values, app] = description;
  request.options.command = take_command(app, words);
  refuse_empty_options(app, words);
  try {
    std::reverse(words.begin(), words.end());  // CLI11 expects reversed order
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    request.help = app.help();
    return std::move(request);
  } catch (const CLI::ParseError& error) {
    refuse(error.what());
  }
  read_words(values, usable_cores, gpus, environment, request);
  if (request.options.command.empty()) refuse("no program is given");
  return std::move(request);
}

}  // namespace lockstep
