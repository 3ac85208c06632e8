#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// `lockstep doctor --hosts`: starts an agent on every machine, as `lockstep run --hosts` does, and lets every pair of
/// machines measure its link.
class DoctorHosts {
 public:
  void add_to(CLI::App& doctor);
  bool asked_for() const { return hosts_ || hostfile_; }
  /// Prints a table of the links and their faults, or one JSON object. Returns 0, or 1 if machines cannot reach each
  /// other. Throws LaunchError.
  int run(bool json) const;

 private:
  std::optional<std::string> hosts_, hostfile_, launch_command_, interface_;
};

/// Problems of links, from the findings of probe_links(); `names` is by rank. Each begins with the machines' names.
struct LinkFindings {
  std::vector<std::string> broken, slow;
};
LinkFindings judge_links(const std::string& found, const std::vector<std::string>& names);

}  // namespace lockstep
