#include "hosts/machine_places.h"

#include <algorithm>
#include <utility>

namespace lockstep::hosts {

std::vector<int> share_out(std::vector<MachinePlaces> machines, int ranks) {
  int places = 0;
  for (const MachinePlaces& machine : machines) places += machine.ranks;
  for (MachinePlaces& machine : machines) {
    if (!machine.lost || places - machine.ranks < ranks) continue;
    places -= std::exchange(machine.ranks, 0);
    machine.most = 0;
  }
  for (; places > ranks; --places) {
    const auto has_ranks = [](const MachinePlaces& machine) { return machine.ranks > 0; };
    const auto may_go = [](const MachinePlaces& machine) { return machine.leaves && machine.ranks > 0; };
    auto least = std::find_if(machines.rbegin(), machines.rend(), may_go);
    if (least == machines.rend()) least = std::find_if(machines.rbegin(), machines.rend(), has_ranks);
    --least->ranks;
    least->leaves = false;
  }
  std::vector<int> shared;
  for (MachinePlaces& machine : machines) {
    const int more = std::max(0, std::min(ranks - places, machine.most - machine.ranks));
    places += more;
    shared.push_back(machine.ranks + more);
  }
  return shared;
}

}  // namespace lockstep::hosts
