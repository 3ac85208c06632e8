#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "doctor_hosts.h"

namespace lockstep {

/// `lockstep doctor`: reports the facts and faults of this machine and this build. Two ranks of a helper program report
/// facts that need LibTorch. With --hosts: several machines, and the links between them.
class DoctorCommand {
 public:
  explicit DoctorCommand(CLI::App& app);

  bool asked_for() const { return doctor_->parsed(); }
  /// Returns 0, or 1 if something is broken.
  int run() const;

 private:
  CLI::App* doctor_;
  DoctorHosts hosts_;
  bool json_ = false;
  std::string other_;
};

}  // namespace lockstep
