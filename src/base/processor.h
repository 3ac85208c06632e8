#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// This machine's kind of processor: equal texts mean equal kinds.
std::string processor_name();

/// The processor in the text of /proc/cpuinfo: the model's name or, for ARM's processors, which have none there, the
/// numbers assigned by their implementer ("ARM, implementer 0x41, part 0xd0c, variant 0x3"). Empty if there is neither.
std::string processor_name_in(const std::string& cpuinfo);

struct MachineProcessor {
  std::string machine, processor;
};

/// The warning to print unless all machines have the first one's kind of processor; empty if they do. A machine may be
/// listed more than once.
std::string warning_of_other_processors(const std::vector<MachineProcessor>& machines);

}  // namespace lockstep
