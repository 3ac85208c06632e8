#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>

#include "base/usable_cores.h"
#include "checkpoint/format/convert.h"
#include "checkpoint/format/inspect.h"
#include "launch/launch_error.h"
#include "launch/launcher.h"

namespace {

using lockstep::kExitBadCommandLine;
using lockstep::LaunchError;

constexpr const char* kUsage =
    "Usage: lockstep run [-n N|auto] [--bind none|core] [--run-dir DIR] [--] PROGRAM [ARGS...]\n"
    "       lockstep inspect FILE\n"
    "       lockstep convert FROM TO\n";

constexpr const char* kFooter = R"(
Rank 0's output comes here; every rank's goes to RUN/rank_<n>.log. Input goes to rank 0. When a rank fails, the others
are stopped, and the first failure is reported.

Exit codes:
   0  all ranks ended with 0          46  the program could not be started
   2  bad command line                48  the run folder cannot be used
  40  a rank failed by itself         50  a limit of the system was reached
  41  a rank was killed by a signal   70  a bug of the launcher
  128 + n  the launcher was stopped by signal n (130: Ctrl-C)
)";

/// CLI11 has no word for "the rest is a command".
class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override { return kUsage; }
};

/// Splits the words after `lockstep run`: those from the program on are returned and taken out, untouched.
std::vector<std::string> take_command(const CLI::App& run, std::vector<std::string>& words) {
  size_t start = 0;
  while (start < words.size() && words[start] != "--" && words[start].starts_with('-')) {
    const CLI::Option* option = run.get_option_no_throw(words[start]);
    start += option != nullptr && option->get_items_expected_max() > 0 ? 2 : 1;
  }
  start = std::min(start, words.size());
  const size_t end = start;
  if (start < words.size() && words[start] == "--") ++start;
  std::vector<std::string> command(words.begin() + static_cast<ptrdiff_t>(start), words.end());
  words.resize(end);
  return command;
}

/// The commands on files: what is in one, and the same in another format.
struct FileCommands {
  explicit FileCommands(CLI::App& app)
      : inspect(app.add_subcommand("inspect", "List the tensors of a .pt or .safetensors file")),
        convert(app.add_subcommand("convert", "Write a .pt file as .safetensors, or the reverse")) {
    inspect->add_option("FILE", from, "A .pt, .pth or .safetensors file")->required();
    convert->add_option("FROM", from, "The file to read")->required();
    convert->add_option("TO", to, "The file to write; its ending says the format")->required();
  }

  bool asked_for() const { return inspect->parsed() || convert->parsed(); }

  bool has(const std::string& word) const { return word == inspect->get_name() || word == convert->get_name(); }

  int run() const {
    try {
      if (inspect->parsed())
        std::cout << lockstep::inspect_file(from);
      else
        std::cerr << lockstep::convert_file(from, to);
    } catch (const lockstep::Error& error) {
      throw LaunchError(lockstep::kExitRefusedInput, error.what());
    }
    return std::cout.flush() ? lockstep::kExitOk : lockstep::kExitStorage;
  }

  CLI::App* inspect;
  CLI::App* convert;
  std::string from, to;
};

/// Runs what the command line asks for.
int run(int argc, char** argv, char** environment) {
  CLI::App app("Lockstep: distributed data-parallel training for C++ on stock LibTorch", "lockstep");
  app.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  app.require_subcommand(1);

  CLI::App& command = *app.add_subcommand("run", "Start a program as several ranks on this machine");
  command.formatter(std::make_shared<RunFormatter>());
  command.footer(kFooter);
  lockstep::LaunchOptions options;
  std::string ranks = "1";
  command
      .add_option("-n,--nproc-per-node,--nproc_per_node", ranks, "Number of ranks, or auto: one for each usable core")
      ->capture_default_str();
  command.add_option(
      "--run-dir,--run_dir", options.run_dir,
      "Folder of the run's files. Default: runs/<time>-<program>-<pid>, removed again if it stays empty");
  command
      .add_option(
          "--bind", options.bind,
          "none: a rank runs on any core. core: each has its own, or an equal share, which keeps the kernel from "
          "putting two ranks onto one core when other programs are busy")
      ->transform(CLI::CheckedTransformer(std::map<std::string, lockstep::Binding>{{"none", lockstep::Binding::kNone},
                                                                                   {"core", lockstep::Binding::kCore}})
                      .description("none|core"))
      ->default_str("none");
  bool ignored = false;
  command.add_flag("--standalone,--no-python,--no_python", ignored, "Accepted as torchrun's, without effect");

  const FileCommands files(app);
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words[0] == "run") {
    words.erase(words.begin());
    options.command = take_command(command, words);
    words.insert(words.begin(), "run");
  } else if (!words.empty() && !words[0].starts_with('-') && !files.has(words[0])) {
    throw LaunchError(kExitBadCommandLine, "unknown command '" + words[0] + "'");
  }
  try {
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    throw LaunchError(kExitBadCommandLine, error.what());
  }
  if (files.asked_for()) return files.run();
  if (options.command.empty()) throw LaunchError(kExitBadCommandLine, "which program is to run?");

  const int cores = lockstep::threads_per_rank({lockstep::allowed_cpus()}, 0, lockstep::cgroup_cpu_quota());
  options.ranks = lockstep::parse_rank_count(ranks, cores);
  lockstep::EnvironmentBlock block;
  for (char** variable = environment; *variable != nullptr; ++variable) block.emplace_back(*variable);
  return lockstep::launch(options, block);
}

}  // namespace

int main(int argc, char** argv, char** environment) {
  try {
    return run(argc, argv, environment);
  } catch (const LaunchError& error) {
    std::cerr << "lockstep: " << error.what() << "\n";
    if (error.exit_code == kExitBadCommandLine)
      std::cerr << kUsage << "Options of the launcher come before PROGRAM; `lockstep run --help` lists them.\n";
    return error.exit_code;
  } catch (const lockstep::Error& error) {
    std::cerr << "lockstep: " << error.what() << "\n";
    return lockstep::kExitResourceLimit;
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << "\nlockstep: this is a bug of the launcher\n";
    return lockstep::kExitOurBug;
  }
}
