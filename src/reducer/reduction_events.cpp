#include "reducer/reduction_events.h"

#include "base/hash.h"

namespace lockstep {

Facts::Settings ReplicaSettings::told(uint64_t reduction) const {
  const auto byte = [&](uint64_t word) {
    constexpr uint64_t kPrime = 251;  // below 255, so that every bit of the hash counts
    return static_cast<int>(Hash::mixed(Hash::mixed(Hash::kStart, word), reduction) % kPrime);
  };
  const bool inside = join == Join::kInside;
  return {.divides_by_active = inside && !divide_by_initial_world_size,
          .throws_early = inside && throw_on_early_termination,
          .checks = byte(static_cast<uint64_t>(check_every) * 2 + (buffers_as_left ? 1 : 0)),
          .frozen = frozen == 0 ? 0 : 1 + byte(frozen)};
}

std::string ReplicaSettings::text() const {
  const auto yes = [](bool value) { return value ? "true\n" : "false\n"; };
  std::string lines = "check_divergence_every(" + std::to_string(check_every) + ")\n";
  lines += std::string("DivergenceOptions::buffers_as_left: ") + yes(buffers_as_left);
  if (join == Join::kOutside) return lines + "outside of join()\n";
  lines += std::string("within join()\nJoinOptions::enable: ") + yes(join == Join::kInside);
  if (join == Join::kSwitchedOff) return lines;
  lines += std::string("JoinOptions::divide_by_initial_world_size: ") + yes(divide_by_initial_world_size);
  return lines + "JoinOptions::throw_on_early_termination: " + yes(throw_on_early_termination);
}

}  // namespace lockstep
