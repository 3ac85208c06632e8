#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// This machine's kind of processor: the same text where the kind is the same.
std::string processor_name();

/// From the text of /proc/cpuinfo: the model's name or, of ARM's processors, which have none there, the numbers that
/// their implementer gives them ("ARM, implementer 0x41, part 0xd0c, variant 0x3"). Empty if it has neither.
std::string processor_name_in(const std::string& cpuinfo);

struct MachineProcessor {
  std::string machine, processor;
};

/// The warning to print unless all machines have the same kind as the first; empty if they do. A machine may be listed
/// more than once.
std::string warning_of_other_processors(const std::vector<MachineProcessor>& machines);

}  // namespace lockstep
