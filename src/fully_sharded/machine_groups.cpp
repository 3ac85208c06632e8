#include "fully_sharded/machine_groups.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/mutex.h"
#include "base/text.h"
#include "checkpoint/sliced_memory.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {
namespace {

bool is_power_of_two(int value) { return (value & (value - 1)) == 0; }

/// Checks each machine's ranks, given as the first one and their number.
void check_subtrees(const Group& all, int first, int ranks_here, int rank_here) {
  const std::string mine = std::to_string(ranks_here);
  const std::vector<std::string> counts = all.all_gather_bytes(mine);
  for (size_t rank = 0; rank < counts.size(); ++rank)
    if (counts[rank] != counts.front())
      throw Error("FullyShardedDataParallel: the machine of rank 0 has " +
                  counted(std::stoi(counts.front()), "rank", "ranks") + " and that of rank " + std::to_string(rank) +
                  " has " + counts[rank] +
                  "; start the same number of ranks on each machine, because each holds an equal part");
  const bool is_one = ranks_here == all.world_size();
  if (!is_one && !is_power_of_two(ranks_here))
    throw Error("FullyShardedDataParallel: each machine has " + mine +
                " ranks; on several machines start 1, 2, 4, 8, ... on each, so that sums have the same bits as on one");
  const bool is_placed = is_one || (first % ranks_here == 0 && first + rank_here == all.rank());
  const auto placed = all.all_gather_bytes(is_placed ? "1" : "0");
  const auto odd = std::find(placed.begin(), placed.end(), "0");
  if (odd != placed.end())
    throw Error("FullyShardedDataParallel: rank " + std::to_string(odd - placed.begin()) +
                " is not on the machine of its neighbours: the ranks of each machine must have consecutive numbers, as "
                "launchers give them by default (not round-robin)");
}

}  // namespace

MachineGroups::MachineGroups(const Group& group, std::string nonce)
    : all_(group),
      nonce_(std::move(nonce)),
      memory_(machine_memory_of(group)),
      ranks_here_(memory_ != nullptr ? memory_->ranks_here() : 1),
      rank_here_(memory_ != nullptr ? memory_->rank_here() : 0) {
  const OperationLabel label("the groups of a FullyShardedDataParallel");
  const bool one_machine = ranks_here_ == all_.world_size();
  int first = one_machine ? 0 : all_.rank();
  if (one_machine) {
    if (ranks_here_ > 1) here_ = all_;
  } else if (memory_ != nullptr) {
    here_ = all_.on_this_machine();
    if (here_->world_size() == 1)
      here_.reset();
    else
      first = std::stoi(here_->broadcast_bytes(std::to_string(all_.rank())));
  }
  check_subtrees(all_, first, ranks_here_, rank_here_);
  if (!one_machine) rail_ = ranks_here_ == 1 ? all_ : all_.split(rank_here_);
}

std::shared_ptr<const MachineGroups> MachineGroups::of(const Group& group) {
  static Mutex mutex;
  static auto* const kKnown = new std::map<const Group::State*, std::weak_ptr<const MachineGroups>>;
  const OperationLabel label("the groups of a FullyShardedDataParallel");
  std::shared_ptr<const MachineGroups> groups;
  {
    const MutexLock lock(mutex);
    groups = (*kKnown)[&state_of(group)].lock();
  }
  std::random_device random;
  const std::string drawn = std::to_string(random()) + '.' + std::to_string(random());
  const auto said = group.all_gather_bytes((groups ? '1' : '0') + drawn);
  if (std::all_of(said.begin(), said.end(), [](const auto& one) { return one.front() == '1'; })) return groups;
  groups = std::make_shared<const MachineGroups>(group, said.front().substr(1));
  const MutexLock lock(mutex);
  (*kKnown)[&state_of(group)] = groups;
  return groups;
}

at::Tensor MachineGroups::allocate_together(int64_t elements, at::ScalarType dtype) const {
  const OperationLabel label("the memory of a FullyShardedDataParallel");
  return memory_ != nullptr ? memory_->allocate_together(elements, dtype) : allocate_alone(elements, dtype);
}

at::Tensor MachineGroups::allocate_in_slices(int64_t slice_elements, at::ScalarType dtype,
                                             const std::string& folder) const {
  std::vector<int> holders;
  for (int slice = 0; slice < all_.world_size(); ++slice)
    holders.push_back(slice % machines() * ranks_here_ + slice / machines());
  return sliced_zeros(slice_elements, dtype, all_.world_size(), slice(), std::move(holders), folder);
}

at::Tensor MachineGroups::allocate_summed(int64_t elements, at::ScalarType dtype) const {
  return here_ ? here_->allocate(elements, dtype) : at::empty({elements}, dtype);
}

}  // namespace lockstep::fully_sharded
