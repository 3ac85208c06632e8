#include "run_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>

#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "nearest_name.h"

namespace lockstep {

const char* const kRunUsage =
    "Usage: lockstep run [-n N|auto] [--max-restarts K] [--log-dir DIR] [--tee all|0|1,2] [--grace S]\n"
    "                    [--hang-timeout S|off] [--env NAME=VALUE] [--bind none|core|numa] [--debugger RANK]\n"
    "                    [--dry-run] [--] PROGRAM [ARGS...]\n";

namespace {

constexpr const char* kFooter = R"(
The output of rank 0, or of the ranks of --tee, is shown here; that of every rank is kept in DIR/rank_<n>.log.
Rank 0 gets the input. When a rank fails, the launcher stops the others and reports the first failure.

Exit codes:
   0  all ranks ended with 0               46  the program could not be started
   2  bad command line                     47  authentication was refused
  40  a rank failed by itself              48  the run folder cannot be used
  41  a rank was killed by a signal        49  no loadable checkpoint, or an input was refused
  42  a rank was killed for memory         50  a limit of the system was reached
  43  the ranks made no progress           60  preempted; the state was saved
  44  the collectives do not match         61  preempted; the state was not saved
  45  the replicas diverged                70  a bug in the launcher
  128 + n  the launcher was stopped by SIGINT or SIGHUP, signal n (130: Ctrl-C)
A failure is reported in one block and in DIR/report.json. SIGTERM and SIGUSR1 ask the ranks to save and leave.
)";

constexpr int kMaxRestarts = 1000;

/// CLI11 has no word for "the rest is a command".
class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override { return kRunUsage; }
};

/// The options' values, as they are written.
struct Words {
  std::string ranks = "1", restarts = "0", tee = "0", grace = "5", hang_timeout = "300", bind = "none", debugger;
  std::vector<std::string> variables;
  bool ignored = false;
};

void add_options(CLI::App& app, RunRequest& request, Words& words) {
  app.add_option("-n,--nproc-per-node", words.ranks,
                 "Number of ranks. auto (torchrun: cpu): one for each usable core; gpu: one for each GPU")
      ->capture_default_str();
  app.add_option("--max-restarts", words.restarts, "Maximum number of restarts after a failure")->capture_default_str();
  app.add_option("--log-dir,--run-dir", request.options.run_dir,
                 "Folder for the run's files. Default: runs/<time>-<program>-<pid>, removed if it stays empty");
  app.add_option("-t,--tee", words.tee, "Ranks whose output is shown here: all, or a list such as 0 or 1,2")
      ->capture_default_str();
  app.add_option("--grace", words.grace, "Seconds between asking the ranks to stop and killing them")
      ->capture_default_str();
  app.add_option("--hang-timeout", words.hang_timeout, "Seconds without progress before a run is ended as hung, or off")
      ->capture_default_str();
  app.add_option("--env", words.variables, "NAME=VALUE for the environment of all ranks; may be repeated")
      ->allow_extra_args(false);
  app.add_option(
         "--bind", words.bind,
         "none: a rank runs on any core. core: each has an equal share of the cores to itself, so that the kernel "
         "does not put two ranks on one core when other programs are busy. numa: a rank runs on the cores "
         "of one NUMA node and takes its memory there")
      ->type_name("none|core|numa")
      ->capture_default_str();
  app.add_option("--debugger", words.debugger, "Run this rank under gdb, or else lldb, on the terminal");
  app.add_flag("--dry-run", request.dry_run, "Print what each rank would run, and start nothing");
  app.add_flag("--standalone,--no-python", words.ignored, "Accepted because torchrun has them; no effect");
}

/// "--max_restarts=1" -> "--max-restarts=1".
std::string with_dashes(const std::string& word) {
  if (!word.starts_with("--")) return word;
  std::string result = word;
  std::replace(result.begin(), result.begin() + static_cast<ptrdiff_t>(std::min(word.find('='), word.size())), '_',
               '-');
  return result;
}

[[noreturn]] void refuse(const std::string& text) { throw LaunchError(kExitBadCommandLine, text); }

/// torchrun's options that mean nothing here get a better answer than "not expected".
std::string hint_for(const std::string& word) {
  for (const char* name : {"--nnodes", "--node-rank", "--rdzv", "--master-addr", "--master-port"})
    if (word.starts_with(name))
      return "; `lockstep run` starts ranks on one machine, which need no address (on several machines use torchrun)";
  return "";
}

/// "-n" of "-n4", "--tee" of "--tee=all".
std::string option_name(const std::string& word) {
  return word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
}

/// The option that `word` begins with. `seen` has the earlier ones, each as it was written.
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

/// Takes the program and its arguments out of `words`, untouched; in the options before them "_" becomes "-".
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

void read_words(const Words& words, int usable_cores, int gpus, RunRequest& request) {
  LaunchOptions& options = request.options;
  options.ranks = parse_rank_count("-n", words.ranks, usable_cores, gpus);
  options.bind = parse_binding(words.bind);
  options.max_restarts = parse_number("--max-restarts", words.restarts, 0, kMaxRestarts);
  options.grace = parse_seconds("--grace", words.grace, false);
  options.hang_timeout = parse_seconds("--hang-timeout", words.hang_timeout, true);
  options.shown_ranks = parse_ranks("--tee", words.tee, options.ranks);
  for (const auto& variable : words.variables) check_variable("--env", variable);
  request.variables = words.variables;
  if (words.debugger.empty()) return;
  options.debugged_rank = parse_number("--debugger", words.debugger, 0, options.ranks - 1);
  options.hang_timeout = kNever;
  std::erase(options.shown_ranks, *options.debugged_rank);
  if (options.max_restarts > 0) refuse("--debugger and --max-restarts cannot be used together; leave one out");
}

}  // namespace

RunRequest parse_run_command(std::vector<std::string> words, int usable_cores, int gpus) {
  CLI::App app("Start a program as several ranks on this machine", "lockstep run");
  app.formatter(std::make_shared<RunFormatter>());
  app.footer(kFooter);
  RunRequest request;
  Words values;
  add_options(app, request, values);
  request.options.command = take_command(app, words);
  try {
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    app.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    request.help = app.help();
    return request;
  } catch (const CLI::ParseError& error) {
    refuse(error.what());
  }
  read_words(values, usable_cores, gpus, request);
  if (request.options.command.empty()) refuse("no program is given");
  return request;
}

}  // namespace lockstep
