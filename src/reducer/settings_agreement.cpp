#include "reducer/settings_agreement.h"

#include <algorithm>
#include <sstream>

#include "base/first_difference.h"
#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
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
  for (const std::string& list : lists) {
    std::vector<std::string> names;
    std::istringstream lines(list);
    for (std::string line; std::getline(lines, line);) names.push_back(line);
    frozen.push_back(std::move(names));
  }
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
