#include "reducer/rank_agreement.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/rank_names.h"
#include "base/text.h"
#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "collectives/sample.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/data_agreement.h"

namespace lockstep {

std::string RankAgreement::names_of_ranks() const { return state_of(plan_.group).on_page.names_of_ranks(); }

void RankAgreement::check_objects(const std::vector<Facts>& rows) const {
  if (std::all_of(rows.begin(), rows.end(), [&](const Facts& facts) { return facts.object == rows[0].object; })) return;
  const OperationLabel label("which model each rank reduces");
  const auto objects = plan_.group.all_gather_bytes("number " + std::to_string(plan_.settings.object) + " (" +
                                                    plan_.names[plan_.buckets.front().front()] + " to " +
                                                    plan_.names[plan_.buckets.back().back()] + ")");
  const std::string text =
      "the ranks reduced gradients of different DistributedDataParallel objects: " +
      ranks_of_each(objects, "those of ") +
      ", numbered in the order in which they were attached to this group. Run their backward passes in the same order "
      "on every rank, or give each object its own subgroup" +
      names_of_ranks();
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void RankAgreement::throw_trouble_of_all() {
  const OperationLabel label("what is wrong on each rank");
  const std::string own = message_.hand_over_trouble();
  std::vector<std::string> troubles;
  try {
    troubles = plan_.group.all_gather_bytes(own);
  } catch (const Error& error) {
    throw Error((own.empty() ? "" : own + "\n") + error.what() + hook_problems_.of_all_ranks(message_.reductions()));
  }
  std::string text;
  for (const std::string& trouble : troubles) {
    if (trouble.empty() || text.find(trouble) != std::string::npos) continue;
    text += (text.empty() ? "" : "\n") + ranks_with(troubles, trouble) + ": " + trouble;
  }
  text += names_of_ranks();
  const auto first = std::find_if(troubles.begin(), troubles.end(), [](const auto& t) { return !t.empty(); });
  const bool mine = !troubles[static_cast<size_t>(plan_.group.rank())].empty();
  // The launcher numbers the ranks of a subgroup differently.
  const bool all = launchers_board() != nullptr && launchers_board()->world_size() == plan_.group.world_size();
  own_page().fail(mine ? RankFailure::kOwn : RankFailure::kPeer,
                  all && !mine ? static_cast<int>(first - troubles.begin()) : -1, text);
  throw Error(text);
}

void RankAgreement::check_joined(const std::vector<Facts>& rows) const {
  if (std::all_of(rows.begin(), rows.end(), std::mem_fn(&Facts::active))) return;
  for (size_t row = 0; row < rows.size(); ++row)
    if (rows[row].active && !rows[row].joining)
      throw Error(plan_.row_kind + "rank " + std::to_string(row) +
                  " ran a backward outside of join() while other ranks had run out of inputs within it; every rank "
                  "must call join()" +
                  names_of_ranks());
}

void RankAgreement::check(const std::vector<Facts>& rows) {
  check_objects(rows);
  if (std::any_of(rows.begin(), rows.end(), std::mem_fn(&Facts::trouble))) throw_trouble_of_all();
  check_joined(rows);
  check_settings(rows);
  check_policies(rows);
  check_data(rows);
  check_local_steps(rows);
}

void RankAgreement::check_settings(const std::vector<Facts>& rows) const {
  const auto differs = [&](const Facts& facts) {
    const Facts& first = rows.front();
    // A rank without inputs has not reached the others' freezing.
    Facts::Settings settings = facts.settings;
    settings.frozen = first.settings.frozen;
    return facts.joining != first.joining || settings != first.settings;
  };
  const auto active = std::find_if(rows.begin(), rows.end(), std::mem_fn(&Facts::active));
  const bool other_frozen = std::any_of(active, rows.end(), [&](const Facts& facts) {
    return facts.active && facts.settings.frozen != active->settings.frozen;
  });
  if (!events_.settings || (!other_frozen && std::none_of(rows.begin(), rows.end(), differs))) return;
  throw_different_settings(plan_.group, events_, message_.facts().active);
}

void RankAgreement::check_policies(const std::vector<Facts>& rows) const {
  std::vector<NonFinitePolicy> policies;
  for (const Facts& facts : rows) policies.push_back(facts.policy);
  if (std::all_of(policies.begin(), policies.end(), [&](auto one) { return one == policies.front(); })) return;
  constexpr std::pair<NonFinitePolicy, const char*> kNames[] = {
      {NonFinitePolicy::kIgnore, "kIgnore"}, {NonFinitePolicy::kSkip, "kSkip"}, {NonFinitePolicy::kRaise, "kRaise"}};
  std::string text;
  for (const auto& [policy, name] : kNames)
    if (std::find(policies.begin(), policies.end(), policy) != policies.end())
      text +=
          (text.empty() ? "" : " and ") + std::string(name) + " on " + plan_.row_kind + ranks_with(policies, policy);
  text = "set_non_finite_policy(): the ranks have different policies: " + text +
         ". Every rank must set the same policy" + names_of_ranks();
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void RankAgreement::check_data(const std::vector<Facts>& rows) {
  const bool begins = message_.is_first_within_join();
  const bool joining = std::any_of(rows.begin(), rows.end(), std::mem_fn(&Facts::joining));
  // Within join() ranks begin their next passes at different reductions.
  if (plan_.group.world_size() == 1 || (joining && !begins) || !differ_in_data(rows)) return;
  compare_passes(plan_.group, message_.loader_passes(), joining);
}

void RankAgreement::check_local_steps(const std::vector<Facts>& rows) {
  if (std::none_of(rows.begin(), rows.end(), std::mem_fn(&Facts::local_step))) return;
  const OperationLabel label("whether replicas differ after a step within no_sync()");
  const std::string own = message_.hand_over_local_step();
  const auto steps = plan_.group.all_gather_bytes(own);
  // A program may change parameters in the same way on all ranks, as one that clips weights does.
  const auto replicas = plan_.group.all_gather_bytes(std::to_string(samples_of(plan_.tensors)));
  if (std::all_of(replicas.begin(), replicas.end(), [&](const auto& one) { return one == replicas.front(); })) return;
  const std::string& step = *std::find_if(steps.begin(), steps.end(), [](const auto& one) { return !one.empty(); });
  const std::string text = ranks_with(steps, step) + ": " + step + names_of_ranks();
  own_page().fail(own.empty() ? RankFailure::kPeer : RankFailure::kOwn, -1, text);
  throw Error(text);
}

std::vector<int> compared_passes(const std::vector<Facts>& rows) {
  std::vector<int> passes;
  for (const Facts& facts : rows) passes.push_back(facts.took_part() && facts.passes > 0 ? facts.passes : -1);
  return passes;
}

void RankAgreement::check_passes(const std::vector<Facts>& rows) const {
  const std::vector<int> passes = compared_passes(rows);
  const int first = *std::max_element(passes.begin(), passes.end());
  const std::string& where = plan_.row_kind;
  for (const int other : passes)
    if (other != -1 && other != first)
      throw Error(
          "the ranks ran different numbers of backward passes before reducing gradients, beginning with those of " +
          (plan_.has_buckets() ? plan_.names[plan_.buckets.front().front()] : "") + ": " + std::to_string(other) +
          " on " + where + ranks_with(passes, other) + " and " + std::to_string(first) + " on " + where +
          ranks_with(passes, first) +
          ". Every rank must run the same number, with no_sync() or accumulate() around the same passes." +
          names_of_ranks());
}

double RankAgreement::factor(const std::vector<Facts>& rows) const {
  if (plan_.settings.reduction == GradientReduction::kSum) return 1;
  if (plan_.settings.reduction == GradientReduction::kWeightedMean) {
    double total = 0;
    for (const Facts& facts : rows) total += facts.took_part() ? facts.weight : 0;
    return total > 0 ? 1 / total : 0;
  }
  // Whether ranks without inputs count is an option of join(); ranks that skip never count.
  size_t counted = 0;
  for (const Facts& facts : rows)
    if (!facts.skipped && (facts.active || !message_.divides_by_active())) ++counted;
  return counted > 0 ? static_cast<double>(rows.size()) / static_cast<double>(counted) : 1;
}

void RankAgreement::agree_on_kept(const std::vector<at::Tensor>& kept, const std::vector<Facts>& rows) const {
  if (kept.empty() || std::none_of(rows.begin(), rows.end(), std::mem_fn(&Facts::skipped))) return;
  const int root = plan_.rank_of_row[static_cast<size_t>(first_that_took_part(rows))];
  const OperationLabel label("gradients that a skipped step leaves as they were");
  std::string mine;
  for (const at::Tensor& tensor : kept) mine += tensor.grad().defined() ? '1' : '0';
  const std::string theirs = plan_.group.all_gather_bytes(mine)[static_cast<size_t>(root)];
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < kept.size(); ++i) {
    at::Tensor& gradient = kept[i].mutable_grad();
    if (theirs[i] == '0')
      gradient.reset();
    else
      gradients.push_back(gradient.defined() ? gradient : gradient = at::zeros_like(kept[i]));
  }
  broadcast_coalesced(plan_.group, gradients, root);
}

bool RankAgreement::drop_non_finite(NonFiniteWatch& watch) const {
  const OperationLabel label("the search for non-finite gradients");
  const std::string findings = watch.findings(plan_.group, plan_.names);
  if (findings.empty()) return false;
  drop_gradients(plan_.tensors);
  if (watch.policy() == NonFinitePolicy::kRaise) {
    own_page().fail(RankFailure::kDiverged, -1, findings);
    throw Error(findings + " (reduction " + std::to_string(message_.reductions()) +
                "); no gradient is left on any rank, so the step can be skipped");
  }
  watch.count_skipped();
  return true;
}

namespace {

[[noreturn]] void refuse_settings(const Group& group, const std::string& why) {
  const std::string text = why + state_of(group).on_page.names_of_ranks();
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

/// The first parameter that some of these ranks have frozen and others not; empty if none. Each list is in the model's
/// order, and null for a rank that does not count.
std::string frozen_on_some(const std::vector<std::string>& lists) {
  std::vector<std::vector<std::string>> frozen;
  for (const std::string& list : lists) frozen.push_back(lines_of(list));
  constexpr const char* kCounts = "+";
  for (const auto& names : frozen)
    for (const std::string& name : names) {
      std::vector<bool> has, has_not;
      for (const auto& others : frozen) {
        const bool counts = !others.empty() && others.front() == kCounts;
        const bool found = std::find(others.begin(), others.end(), name) != others.end();
        has.push_back(counts && found);
        has_not.push_back(counts && !found);
      }
      if (std::find(has_not.begin(), has_not.end(), true) == has_not.end()) continue;
      return "parameter " + name + " is frozen (requires_grad_(false)) on " + rank_names(has) + " and not on " +
             rank_names(has_not);
    }
  return "";
}

}  // namespace

void throw_different_settings(const Group& group, const ReductionEvents& events, bool active) {
  const OperationLabel label("what each rank has set for its DistributedDataParallel");
  const std::string difference = first_difference("setting", group.all_gather_bytes(events.settings().text()));
  if (!difference.empty())
    refuse_settings(group, "the ranks have set their DistributedDataParallel differently: " + difference +
                               ". Make the same call with the same options on every rank, between the same two steps");
  std::string own = active ? "+\n" : "";
  for (const std::string& name : events.frozen()) own += active ? name + '\n' : "";
  const std::string frozen = frozen_on_some(group.all_gather_bytes(own));
  if (!frozen.empty())
    refuse_settings(group, frozen + ". Freeze a parameter on every rank, between the same two steps, or on none");
}

}  // namespace lockstep
