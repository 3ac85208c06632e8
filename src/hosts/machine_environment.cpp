#include "hosts/machine_environment.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace lockstep::hosts {
namespace {

constexpr const char* kOfAMachine[] = {"LOCKSTEP_MACHINE", "HOSTNAME",      "TMPDIR",     "XDG_RUNTIME_DIR",
                                       "SSH_CONNECTION",   "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_TTY"};

}  // namespace

EnvironmentBlock environment_here(const EnvironmentBlock& coordinators, const EnvironmentBlock& own) {
  EnvironmentBlock here = coordinators;
  for (const std::string name : kOfAMachine) {
    const auto has_name = [&](const std::string& variable) { return variable.starts_with(name + "="); };
    std::erase_if(here, has_name);
    std::copy_if(own.begin(), own.end(), std::back_inserter(here), has_name);
  }
  return here;
}

}  // namespace lockstep::hosts
