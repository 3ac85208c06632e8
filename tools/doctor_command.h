#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
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

/// The facts of `lockstep doctor` about the machine, without starting a rank: system, processor, cores, quota, NUMA
/// nodes, memory, limits, and the versions of other launchers in PATH. Takes as long as those need to print their
/// versions, a few seconds at most.
nlohmann::json machine_facts();

/// The number of NVIDIA GPUs with devices in `folder` (/dev/nvidia0, ...), at most as many as `visible`, the value of
/// CUDA_VISIBLE_DEVICES, names; "-" if that is not set.
int count_gpus(const std::string& visible, const std::string& folder = "/dev");

}  // namespace lockstep
