#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "doctor_command.h"
#include "file_commands.h"
#include "launch/launch_error.h"
#include "report_command.h"
#include "run_command.h"
#include "run_options.h"
#include "status_command.h"

namespace {

using lockstep::kExitBadCommandLine;
using lockstep::LaunchError;

/// Runs what the command line asks for.
int run(std::vector<std::string> words, const lockstep::EnvironmentBlock& environment) {
  // What comes after `run` is its own matter, and the program's.
  if (!words.empty() && words[0] == "run") {
    words.erase(words.begin());
    return lockstep::run_command(std::move(words), environment);
  }
  CLI::App app("Lockstep: distributed data-parallel training for C++ on stock LibTorch", "lockstep");
  app.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  app.require_subcommand(1);
  app.add_subcommand("run", "Start a program as several ranks on this machine");
  const lockstep::FileCommands files(app);
  const lockstep::DoctorCommand doctor(app);
  const ReportCommand report(app);
  const lockstep::StatusCommand status(app);
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (!words.empty() && !words[0].starts_with('-') &&
      std::none_of(commands.begin(), commands.end(), [&](auto* command) { return command->get_name() == words[0]; }))
    throw LaunchError(kExitBadCommandLine, "unknown command '" + words[0] + "'");
  try {
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    throw LaunchError(kExitBadCommandLine, error.what());
  }
  if (doctor.asked_for()) return doctor.run();
  if (status.asked_for()) return status.run();
  return report.asked_for() ? report.run() : files.run();
}

}  // namespace

int main(int argc, char** argv, char** environment) {
  try {
    lockstep::EnvironmentBlock block;
    for (char** variable = environment; *variable != nullptr; ++variable) block.emplace_back(*variable);
    return run({argv + std::min(argc, 1), argv + argc}, block);
  } catch (const LaunchError& error) {
    std::cerr << "lockstep: " << error.what() << "\n";
    if (error.exit_code == kExitBadCommandLine)
      std::cerr << lockstep::kRunUsage
                << "Options of the launcher come before PROGRAM; `lockstep run --help` lists them. Other commands:\n"
                   "`lockstep --help`.\n";
    return error.exit_code;
  } catch (const lockstep::Error& error) {
    std::cerr << "lockstep: " << error.what() << "\n";
    return lockstep::kExitResourceLimit;
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << "\nlockstep: this is a bug of the launcher\n";
    return lockstep::kExitOurBug;
  }
}
