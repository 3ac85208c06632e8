#pragma once

#include <string>

namespace lockstep {

/// This machine's kind of processor: the same text where the kind is the same.
std::string processor_name();

/// From the text of /proc/cpuinfo: the model's name or, of ARM's processors, which have none there, the numbers that
/// their implementer gives them ("ARM, implementer 0x41, part 0xd0c, variant 0x3"). Empty if it has neither.
std::string processor_name_in(const std::string& cpuinfo);

}  // namespace lockstep
