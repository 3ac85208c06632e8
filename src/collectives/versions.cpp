#include "collectives/versions.h"

#include <c10/util/Exception.h>
#include <caffe2/core/common.h>
#include <torch/version.h>

#include <iomanip>
#include <istream>
#include <ostream>

#include "base/error.h"
#include "base/machine_name.h"
#include "base/processor.h"
#include "base/version.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// at::show_config() has it, too, but takes 0.4 ms.
std::string libtorch_version() {
  const auto& options = caffe2::GetBuildOptions();
  const auto found = options.find("TORCH_VERSION");
  return found == options.end() || found->second.empty() ? TORCH_VERSION : found->second;
}

std::string shown_machine(const std::string& machine) {
  const std::string given = machine.substr(machine.rfind('/') + 1);  // LOCKSTEP_MACHINE
  return given.empty() ? machine.substr(0, machine.find('/')) : given;
}

}  // namespace

Versions Versions::loaded_here() { return {machine_name(), library_version(), libtorch_version(), processor_name()}; }

std::ostream& operator<<(std::ostream& text, const Versions& versions) {
  return text << versions.machine << ' ' << versions.lockstep << ' ' << versions.libtorch << ' '
              << std::quoted(versions.processor);
}

std::istream& operator>>(std::istream& text, Versions& versions) {
  return text >> versions.machine >> versions.lockstep >> versions.libtorch >> std::quoted(versions.processor);
}

void require_same_versions(const std::vector<Versions>& versions, const std::function<void()>& leave) {
  const Versions& first = versions.front();
  for (size_t rank = 1; rank < versions.size(); ++rank) {
    const Versions& one = versions[rank];
    const bool lockstep = one.lockstep != first.lockstep;
    if (!lockstep && one.libtorch == first.libtorch) continue;
    const auto has = [&](const Versions& of) {
      return " on " + shown_machine(of.machine) + " has " +
             (lockstep ? "Lockstep " + of.lockstep : "LibTorch " + of.libtorch);
    };
    const std::string found = "rank " + std::to_string(rank) + has(one) + ", and rank 0" + has(first);
    leave();
    note_error(RankFailure::kMissing, static_cast<int>(rank), found);  // for the launcher: that rank does not join
    throw Error(found + "; install the same version on all machines");
  }
}

void warn_of_other_processors(const std::vector<Versions>& versions, int rank) {
  if (rank != 0 || launchers_board() != nullptr) return;
  std::vector<MachineProcessor> processors;
  for (const Versions& one : versions) processors.push_back({shown_machine(one.machine), one.processor});
  if (const std::string warning = warning_of_other_processors(processors); !warning.empty()) {
    TORCH_WARN_ONCE(warning);
  }
}

}  // namespace lockstep
