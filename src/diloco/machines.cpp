#include "diloco/machines.h"

#include <algorithm>
#include <map>

#include <c10/util/Exception.h>

#include <lockstep/error.h>

#include "base/machine_name.h"
#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

/// The ranks of this rank's replicas, as numbers of `all`: "2 3". Empty if the replicas are on several machines.
std::string replicas_of(const Group& all, const Group& model) {
  std::string ranks, machine;
  for (const std::string& told : model.all_gather_bytes(std::to_string(all.rank()) + ' ' + machine_name())) {
    const size_t space = told.find(' ');
    if (!machine.empty() && told.substr(space + 1) != machine) return "";
    machine = told.substr(space + 1);
    if (!ranks.empty()) ranks += ' ';
    ranks += told.substr(0, space);
  }
  return ranks;
}

std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> numbers;
  for (size_t at = 0; at < text.size(); at = std::min(text.find(' ', at), text.size() - 1) + 1)
    numbers.push_back(std::stoi(text.substr(at)));
  return numbers;
}

/// The number of ranks in the run.
int ranks_of_run(const Group& group) {
  int most = group.world_size();
  for (const auto& each : state_of(group).membership->groups()) most = std::max(most, each->world_size);
  return most;
}

}  // namespace

Machines::Machines(const Group& all, const Group& model, std::optional<int> island)
    : all_(all), here_(model), island_(island) {
  const OperationLabel label("the machines of a DiLoCo");
  const std::vector<std::string> replicas = all.all_gather_bytes(replicas_of(all, model));
  std::map<std::string, size_t> known;
  for (size_t rank = 0; rank < replicas.size(); ++rank) {
    if (replicas[rank].empty())
      throw Error("DiLoCo: the model of " + ranks_with(replicas, std::string()) +
                  " is replicated over several machines, so each of its steps would send all gradients between them; "
                  "make the DistributedDataParallel with the group's on_this_machine()");
    if (!known.emplace(replicas[rank], ranks_.size()).second) continue;
    ranks_.push_back(numbers_in(replicas[rank]));
  }
  own_ = static_cast<int>(known.at(replicas[static_cast<size_t>(all.rank())]));
  size_t fewest = ranks_.front().size(), together = 0;
  for (const auto& ranks : ranks_) fewest = std::min(fewest, ranks.size()), together += ranks.size();
  if (together != replicas.size())
    throw Error("DiLoCo: the models' groups have " + std::to_string(together) + " ranks, and the DiLoCo's group has " +
                std::to_string(replicas.size()) + "; make it with the group on which on_this_machine() was called");
  if (const int run = ranks_of_run(all); ranks_.size() == 1 && together < static_cast<size_t>(run))
    throw Error(
        "DiLoCo: its group has the " + std::to_string(together) + " ranks of one machine, and the run has " +
        std::to_string(run) +
        ", so nothing would synchronise the machines; make it with the group on which on_this_machine() was called");
  slices_ = static_cast<int>(fewest);
  rail_ = all.split(std::min(here_.rank(), slices_));
  if (!owns_slice()) return;
  std::vector<int> members;
  for (const auto& ranks : ranks_) members.push_back(ranks[static_cast<size_t>(here_.rank())]);
  std::vector<int> ordered = members;
  std::sort(ordered.begin(), ordered.end());
  for (const int member : members)
    in_rail_.push_back(static_cast<int>(std::find(ordered.begin(), ordered.end(), member) - ordered.begin()));
}

std::vector<int64_t> Machines::layout() const {
  std::vector<int64_t> all;
  for (const auto& ranks : ranks_) {
    all.insert(all.end(), ranks.begin(), ranks.end());
    all.push_back(-1);
  }
  return all;
}

void Machines::warn_of(int machine, const std::string& what) const {
  if (all_.rank() == 0 || (machine == own_ && here_.rank() == 0)) TORCH_WARN("DiLoCo: ", name_of(machine), ' ', what);
}

std::string Machines::name_of(int machine) const {
  std::vector<int> ranks = ranks_[static_cast<size_t>(machine)];
  std::sort(ranks.begin(), ranks.end());
  return "machine " + std::to_string(island_.value_or(machine)) + " (" + rank_names(ranks) + ")";
}

std::string Machines::name_of_first_rank(int machine) const {
  const std::string rank = "rank " + std::to_string(first_rank(machine));
  return island_ ? rank + " of machine " + std::to_string(*island_) : rank;
}

}  // namespace lockstep::diloco
