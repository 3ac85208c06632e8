#include "report_command.h"

#include <iostream>

#include "launch/launch_error.h"
#include "report/report.h"

ReportCommand::ReportCommand(CLI::App& app)
    : command_(app.add_subcommand("report", "Draw a run's log as one HTML page, RUN/report.html")) {
  command_->add_option("RUN", folder_, "A run folder with files of lockstep::RunLog or TensorBoard")->required();
  command_->add_option("-o,--output", output_, "Where to write the page instead")->type_name("FILE");
}

int ReportCommand::run() const {
  try {
    std::cout << lockstep::write_report(folder_, output_) << "\n";
  } catch (const lockstep::Error& error) {
    throw lockstep::LaunchError(lockstep::kExitRefusedInput, error.what());
  }
  return std::cout.flush() ? lockstep::kExitOk : lockstep::kExitStorage;
}
