#include "join_command.h"
#include "base/machine_name.h"

#include "hosts/island_agent.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kPatienceToJoin(10);

}  // namespace

JoinCommand::JoinCommand(CLI::App& app)
    : command_(app.add_subcommand("join", "Let this machine take part in a run of --islands on other machines")) {
  command_->add_option("--coordinator", coordinator_, "An address and the port that the run has told at its start")
      ->required()
      ->type_name("HOST:PORT");
  command_->add_option("--key-file", key_file_, "The run's key; else LOCKSTEP_KEY_FILE")->type_name("FILE");
  command_
      ->add_option("--name", name_,
                   "This machine's name, by which it gets its earlier place back. Default: the host's name")
      ->type_name("NAME");
}

int JoinCommand::run(const EnvironmentBlock& environment) const {
  const std::string key_file = key_file_.empty() ? find_variable(environment, "LOCKSTEP_KEY_FILE", "") : key_file_;
  if (key_file.empty())
    throw LaunchError(kExitRefusedPeer,
                      "there is no key: give the --key-file (or LOCKSTEP_KEY_FILE) of the run that this machine joins");
  const std::string patience = find_variable(environment, "LOCKSTEP_JOIN_TIMEOUT_S", "");
  const hosts::AgentOptions options{
      .coordinators = {hosts::parse_endpoint("--coordinator", coordinator_)},
      .node = -1,
      .interface = "",
      .patience = patience.empty() ? kPatienceToJoin : parse_seconds("LOCKSTEP_JOIN_TIMEOUT_S", patience, false),
      .command = "",
      .join_name = name_.empty() ? host_name() : name_};
  return hosts::run_island_agent(options, hosts::Key::from_file(key_file), environment);
}

}  // namespace lockstep
