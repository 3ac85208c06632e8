#include "file_commands.h"

#include <iostream>

#include "checkpoint/format/file_tools.h"
#include "launch/launch_error.h"
#include "report/report.h"

namespace lockstep {

FileCommands::FileCommands(CLI::App& app)
    : inspect_(app.add_subcommand("inspect", "List the tensors of a .pt or .safetensors file")),
      convert_(app.add_subcommand("convert", "Write a .pt file as .safetensors, or the reverse")) {
  inspect_->add_option("FILE", from_, "A .pt, .pth or .safetensors file")->required();
  convert_->add_option("FROM", from_, "The file to read")->required();
  convert_->add_option("TO", to_, "The file to write; its extension gives the format")->required();
}

int FileCommands::run() const {
  try {
    if (inspect_->parsed())
      inspect_file(from_, [](const std::string& text) { std::cout << text; });
    else
      std::cerr << convert_file(from_, to_);
  } catch (const Error& error) {
    throw LaunchError(kExitRefusedInput, error.what());
  }
  return std::cout.flush() ? kExitOk : kExitStorage;
}

ReportCommand::ReportCommand(CLI::App& app)
    : command_(app.add_subcommand("report", "Draw a run's log as one HTML page, RUN/report.html")) {
  command_->add_option("RUN", folder_, "A run folder with files of lockstep::RunLog or TensorBoard")->required();
  command_->add_option("-o,--output", output_, "Where to write the page instead")->type_name("FILE");
}

int ReportCommand::run() const {
  try {
    std::cout << write_report(folder_, output_) << "\n";
  } catch (const Error& error) {
    throw LaunchError(kExitRefusedInput, error.what());
  }
  return std::cout.flush() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
