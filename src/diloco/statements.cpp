#include "diloco/statements.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

struct Head {
  int64_t step, fragment;
  Standing standing;
};

std::string where(const Head& head) {
  return std::to_string(head.step) + (head.fragment == Place::kFinish ? ", in finish()," : "");
}

/// Describes why a round failed, from the machines' statements; empty: it succeeded.
std::string error_of(const Machines& machines, const std::vector<Head>& heads, const std::vector<std::string>& names) {
  for (int machine = 0; machine < machines.count(); ++machine) {
    const Head& head = heads[static_cast<size_t>(machine)];
    const auto [condition, detail, outer] = head.standing;
    if (condition == Condition::kRefreshed)
      return "DiLoCo: the model of " + machines.name_of(machine) +
             " was changed by refresh() after the DiLoCo was made; make a new DiLoCo on every rank after an edit";
    if (condition == Condition::kFrozen)
      return "DiLoCo: parameter " + names.at(static_cast<size_t>(detail)) + " of " + machines.name_of(machine) +
             " was frozen after the DiLoCo was made, but other machines or the outer momentum would continue to move "
             "it; freeze it on every rank, and make a new DiLoCo";
    if (condition == Condition::kDiverged)
      return "DiLoCo: the replicas of " + machines.name_of(machine) + " differ: rank " + std::to_string(detail) +
             " has other parameters than rank " + std::to_string(machines.first_rank(machine)) +
             "; reduce gradients in each step, and change parameters on all ranks of a machine alike "
             "(check_divergence_every() finds the step)";
    if (condition == Condition::kOutOfStep)
      return "DiLoCo: the ranks of " + machines.name_of(machine) +
             " have called step() different numbers of times; call it after each step of the optimizer, on every rank";
    if (head.step != heads.front().step || head.fragment != heads.front().fragment)
      return "DiLoCo: " + machines.name_of(0) + " is at step " + where(heads.front()) + " and " +
             machines.name_of(machine) + " at step " + where(head) +
             "; all machines must call step() equally often, and finish() at the same step";
    if (outer != heads.front().standing.outer && head.fragment == Place::kFinish)
      return "DiLoCo: " + machines.name_of(machine) + " has had other rounds than " + machines.name_of(0) +
             " before finish() at step " + std::to_string(head.step) +
             "; load states that were saved together, on all machines, and call synchronise() at the same steps";
    if (outer != heads.front().standing.outer)
      return "DiLoCo: " + machines.name_of(machine) + " has another outer copy than " + machines.name_of(0) +
             " before the round of step " + std::to_string(head.step) +
             "; load states that were saved together, on all machines, or make a new DiLoCo";
  }
  return "";
}

}  // namespace

Statements::Statements(const Machines& machines, Place place, Standing own)
    : place_(place),
      own_(at::empty({sizeof(Head)}, at::kByte)),
      all_(at::empty({machines.count(), sizeof(Head)}, at::kByte)),
      work_([&] {
        const Head head{place.step, place.fragment, own};
        std::memcpy(own_.mutable_data_ptr(), &head, sizeof head);
        const OperationLabel label(place.fragment == Place::kFinish ? "finish() of DiLoCo" : "a round of DiLoCo");
        return machines.rail().all_gather_async(all_, own_);
      }()) {}

Outcome Statements::outcome(const Machines& machines) {
  work_.wait();
  std::vector<Head> heads(static_cast<size_t>(machines.count()));
  for (int machine = 0; machine < machines.count(); ++machine)
    std::memcpy(&heads[static_cast<size_t>(machine)], all_[machines.in_rail(machine)].const_data_ptr(), sizeof(Head));
  Outcome outcome{{}, error_of(machines, heads, *place_.names)};
  for (const Head& head : heads) outcome.took_part.push_back(head.standing.condition == Condition::kTakesPart);
  return outcome;
}

int64_t Statements::bytes_sent(const Machines& machines) {
  return static_cast<int64_t>(sizeof(Head)) * (machines.count() - 1);
}

Outcome shared(const Machines& machines, std::optional<Outcome> own) {
  if (machines.here().world_size() == machines.slices()) return *own;
  // The first rank of each machine has a slice, and every rail the same outcome.
  std::string text;
  if (own) {
    for (const bool one : own->took_part) text += one ? '1' : '0';
    text += own->error;
  }
  const OperationLabel label("a round of DiLoCo");
  text = machines.here().broadcast_bytes(text);
  const auto count = static_cast<size_t>(machines.count());
  Outcome outcome{{}, text.substr(count)};
  for (size_t machine = 0; machine < count; ++machine) outcome.took_part.push_back(text[machine] == '1');
  return outcome;
}

void check_together(const Machines& machines, Place place, uint64_t rounds) {
  const OperationLabel label("finish() of DiLoCo");
  const int64_t words[] = {place.step, static_cast<int64_t>(rounds)};
  const at::Tensor all = machines.here().all_gather(at::tensor(c10::ArrayRef<int64_t>(words), at::kLong)).view({-1, 2});
  Standing standing{.outer = rounds};
  for (int rank = 1; rank < machines.here().world_size(); ++rank)
    if (!at::equal(all[rank], all[0])) standing.condition = Condition::kOutOfStep;
  std::optional<Outcome> outcome;
  if (machines.owns_slice()) outcome = Statements(machines, place, standing).outcome(machines);
  if (const std::string error = shared(machines, std::move(outcome)).error; !error.empty()) throw Error(error);
}

}  // namespace lockstep::diloco
