#include "hosts/machine_memory.h"

#include "base/state_memory.h"

namespace lockstep::hosts {

MachineMemory::MachineMemory() : memory_(StateMemory::make()) {}

void MachineMemory::write(const Keep& order) {
  written_ =
      std::async(std::launch::async, [fd = fd(), order] { return keep_state(fd, order.other_folder, order.is_sound); });
}

std::optional<KeptState> MachineMemory::written(std::chrono::milliseconds time) {
  if (!written_.valid() || written_.wait_for(time) != std::future_status::ready) return std::nullopt;
  return written_.get();
}

}  // namespace lockstep::hosts
