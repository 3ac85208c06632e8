#include <poll.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "describing_commands.h"
#include "doctor_command.h"
#include "empty_values.h"
#include "explain_command.h"
#include "file_commands.h"
#include "help_text.h"
#include "join_command.h"
#include "launch/error_page.h"
#include "launch/launch_error.h"
#include "nearest_name.h"
#include "resize_command.h"
#include "run_options.h"
#include "status_command.h"
#include "tour_command.h"

namespace {

using lockstep::kExitBadCommandLine;
using lockstep::LaunchError;

/// The version, and the build's options, which CMake defines (tools/CMakeLists.txt).
const char* build_facts() {
  return "lockstep " LOCKSTEP_VERSION
         "\n"
         "built: " LOCKSTEP_BUILT_BY
         "\n"
         "LibTorch: " LOCKSTEP_BUILT_WITH_TORCH
         "\n"
         "engines: " LOCKSTEP_ENGINES;
}

/// An error for the first word after a command that is not one of its options; empty if all are.
std::string unknown_option(const CLI::App& command, const std::vector<std::string>& words) {
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string name = words[i].substr(0, words[i].find('='));
    if (!name.starts_with("--") || name == "--" || command.get_option_no_throw(name) != nullptr) continue;
    std::vector<std::string> known;
    for (const CLI::Option* option : command.get_options())
      for (const std::string& one : option->get_lnames()) known.push_back("--" + one);
    return "`lockstep " + command.get_name() + "` has no option " + name + lockstep::did_you_mean(name, known);
  }
  return "";
}

/// The text printed after the reason when a command line is refused.
std::string usage_for(const std::vector<std::string>& words, const std::vector<std::string>& commands) {
  const std::string command = words.empty() ? "" : words[0];
  if (command == "run")
    return std::string(lockstep::kRunUsage) +
           "Put the launcher's options before PROGRAM; `lockstep run --help` lists them, and `lockstep --help` the\n"
           "other commands.\n";
  if (std::find(commands.begin(), commands.end(), command) != commands.end())
    return "`lockstep " + command + " --help` lists its options.\n";
  return "Usage: lockstep COMMAND ...; `lockstep --help` lists the commands.\n";
}

/// Runs the requested command. `commands` becomes the names of the available commands.
int run(std::vector<std::string> words, const lockstep::EnvironmentBlock& environment,
        std::vector<std::string>& commands) {
  // `run` parses its own arguments: the rest belongs to the program.
  if (!words.empty() && words[0] == "run") {
    words.erase(words.begin());
    return lockstep::run_command(std::move(words), environment);
  }
  if (!words.empty() && words[0] == "agent")
    return lockstep::agent_command({words.begin() + 1, words.end()}, environment);
  CLI::App app("Lockstep: distributed data-parallel training for C++ on stock LibTorch", "lockstep");
  app.formatter(std::make_shared<lockstep::HelpFormatter>());
  app.set_version_flag("--version", build_facts());
  app.require_subcommand(1);
  app.add_subcommand("run", "Start a program as several ranks, on this machine or on several");
  const lockstep::FileCommands files(app);
  const lockstep::DoctorCommand doctor(app);
  const lockstep::ReportCommand report(app);
  const lockstep::StatusCommand status(app);
  const lockstep::ResizeCommand resize(app);
  const lockstep::JoinCommand join(app);
  const lockstep::TourCommand tour(app);
  const lockstep::ExplainCommand explain(app);
  const lockstep::DescribingCommands describing(app);
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(command->get_name());
  if (!words.empty() && !words[0].starts_with('-')) {
    if (std::find(commands.begin(), commands.end(), words[0]) == commands.end())
      throw LaunchError(kExitBadCommandLine,
                        "unknown command '" + words[0] + "'" + lockstep::did_you_mean(words[0], commands));
    if (const std::string problem = unknown_option(*app.get_subcommand(words[0]), words); !problem.empty())
      throw LaunchError(kExitBadCommandLine, problem);
    lockstep::refuse_empty_options(*app.get_subcommand(words[0]), words);
  }
  try {
    std::reverse(words.begin(), words.end());  // CLI11 expects reversed order
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    throw LaunchError(kExitBadCommandLine, error.what());
  }
  for (const CLI::App* command : app.get_subcommands()) lockstep::refuse_empty_arguments(*command);
  if (doctor.asked_for()) return doctor.run();
  if (status.asked_for()) return status.run();
  if (resize.asked_for()) return resize.run();
  if (join.asked_for()) return join.run(environment);
  if (tour.asked_for()) return tour.run();
  if (explain.asked_for()) return explain.run();
  if (describing.asked_for()) return describing.run();
  return report.asked_for() ? report.run() : files.run();
}

/// Reports output of a command that did not reach stdout. A reader that has left (`| head -1`) knows.
int finished(int code) {
  if (code != lockstep::kExitStorage || std::cout) return code;
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  const bool nobody_reads = ::poll(&out, 1, 0) == 1 && (out.revents & (POLLERR | POLLHUP)) != 0;
  if (!nobody_reads) std::cerr << "lockstep: the output could not be written to stdout\n" << lockstep::page_line(code);
  return code;
}

}  // namespace

int main(int argc, char** argv, char** environment) {
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  std::vector<std::string> commands;
  try {
    lockstep::EnvironmentBlock block;
    for (char** variable = environment; *variable != nullptr; ++variable) block.emplace_back(*variable);
    return finished(run(words, block, commands));
  } catch (const LaunchError& error) {
    const bool usage = error.exit_code == kExitBadCommandLine;
    return lockstep::print_launcher_error(error, error.exit_code, usage ? usage_for(words, commands) : "");
  } catch (const lockstep::Error& error) {
    return lockstep::print_launcher_error(error, lockstep::kExitResourceLimit);
  } catch (const std::exception& error) {
    return lockstep::print_launcher_error(error, lockstep::kExitOurBug, "lockstep: this is a bug in the launcher\n");
  }
}
