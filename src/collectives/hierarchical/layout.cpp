#include "collectives/hierarchical/layout.h"

#include <algorithm>
#include <bit>

namespace lockstep::hierarchical_engine {
namespace {

/// Adds the nodes of the tree over ranks [first, last); returns the number of its root. Steps are numbered from 0 and
/// marked by their complement, because the number of partial sums is not known yet.
int add_subtree(const Layout& layout, int first, int last, SumOrder& order) {
  const auto machine = [&](int rank) { return layout.machine_of[static_cast<size_t>(rank)]; };
  bool together = true;
  for (int rank = first; rank < last; ++rank) together = together && machine(rank) == machine(first);
  if (together) {
    int& count = order.partials_of[static_cast<size_t>(machine(first))];
    order.partials.push_back({machine(first), first, last, count++});
    return static_cast<int>(order.partials.size()) - 1;
  }
  // The left half of n ranks has the largest power of two below n.
  const int left = static_cast<int>(std::bit_ceil(static_cast<unsigned>(last - first))) / 2;
  const int a = add_subtree(layout, first, first + left, order), b = add_subtree(layout, first + left, last, order);
  order.steps.push_back({a, b});
  return ~(static_cast<int>(order.steps.size()) - 1);
}

/// The steps that add nodes [first, last), each a leaf, as add_subtree() does; returns the number of their root.
int add_leaves(int first, int last, int leaves, std::vector<SumOrder::Step>& steps) {
  if (last - first == 1) return first;
  const int left = static_cast<int>(std::bit_ceil(static_cast<unsigned>(last - first))) / 2;
  const int a = add_leaves(first, first + left, leaves, steps), b = add_leaves(first + left, last, leaves, steps);
  steps.push_back({a, b});
  return leaves + static_cast<int>(steps.size()) - 1;
}

bool adds_machines_in_tree(const Layout& layout, const SumOrder& order) {
  const int machines = layout.machines();
  if (static_cast<int>(order.partials.size()) != machines) return false;
  for (int i = 0; i < machines; ++i)
    if (order.partials[static_cast<size_t>(i)].machine != i) return false;
  std::vector<SumOrder::Step> steps;
  add_leaves(0, machines, machines, steps);
  return std::equal(steps.begin(), steps.end(), order.steps.begin(), order.steps.end(),
                    [](const auto& a, const auto& b) { return a.left == b.left && a.right == b.right; });
}

}  // namespace

Layout Layout::of(int rank, const std::vector<std::string>& machines) {
  Layout layout{.rank = rank, .machine_of = {}, .local_of = {}, .ranks = {}};
  std::vector<std::string> known;
  for (size_t r = 0; r < machines.size(); ++r) {
    const auto place = std::find(known.begin(), known.end(), machines[r]);
    const auto machine = static_cast<size_t>(place - known.begin());
    if (place == known.end()) {
      known.push_back(machines[r]);
      layout.ranks.emplace_back();
    }
    layout.machine_of.push_back(static_cast<int>(machine));
    layout.local_of.push_back(static_cast<int>(layout.ranks[machine].size()));
    layout.ranks[machine].push_back(static_cast<int>(r));
  }
  return layout;
}

int Layout::rails() const {
  size_t fewest = ranks.front().size();
  for (const auto& on_machine : ranks) fewest = std::min(fewest, on_machine.size());
  return static_cast<int>(fewest);
}

int Layout::most_on_a_machine() const {
  size_t most = 0;
  for (const auto& on_machine : ranks) most = std::max(most, on_machine.size());
  return static_cast<int>(most);
}

SumOrder SumOrder::over(const Layout& layout) {
  SumOrder order;
  order.partials_of.resize(static_cast<size_t>(layout.machines()));
  add_subtree(layout, 0, layout.world_size(), order);
  const auto count = static_cast<int>(order.partials.size());
  const auto number = [&](int node) { return node < 0 ? count + ~node : node; };
  for (Step& step : order.steps) step = {number(step.left), number(step.right)};
  order.is_tree_over_machines = adds_machines_in_tree(layout, order);
  return order;
}

bool SumOrder::adds_nothing_within_machines() const {
  return std::all_of(partials.begin(), partials.end(),
                     [](const Partial& partial) { return partial.last - partial.first == 1; });
}

}  // namespace lockstep::hierarchical_engine
