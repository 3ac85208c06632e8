#include "reducer/gradient_marks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace lockstep {
namespace {

struct Registry {
  Mutex mutex;
  std::vector<const AcceptingGradients*> list LOCKSTEP_GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const kRegistry = new Registry;
  return *kRegistry;
}

}  // namespace

AcceptingGradients::AcceptingGradients(GradientQuestions questions) : questions_(std::move(questions)) {
  const MutexLock lock(registry().mutex);
  registry().list.push_back(this);
}

AcceptingGradients::~AcceptingGradients() {
  const MutexLock lock(registry().mutex);
  std::erase(registry().list, this);
}

void accept_gradients(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  for (const AcceptingGradients* one : registry().list) one->questions_.accept(parameters);
}

std::optional<KnownGradients> known_gradients(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  std::optional<KnownGradients> all;
  for (const AcceptingGradients* one : registry().list) {
    auto known = one->questions_.know(parameters);
    if (!known) continue;
    if (!all) {
      all = std::move(known);
      continue;
    }
    if (!all->ranks) all->ranks = known->ranks;
    all->contributed = all->contributed || known->contributed;
    all->absent = all->absent && known->absent;
    all->held_back = std::max(all->held_back, known->held_back);
    all->shares = std::max(all->shares, known->shares);
    all->drops = all->drops || known->drops;
    all->identity ^= known->identity;
    all->leaves.insert(known->leaves.begin(), known->leaves.end());
    GradientEdits& edits = all->edits;
    const bool any_before = edits.any;
    edits.any = edits.any || known->edits.any;
    edits.cleared = Hash::mixed(edits.cleared, known->edits.cleared);
    edits.cleared_here = edits.cleared_here || known->edits.cleared_here;
    if (known->edits.any) edits.all_cleared = known->edits.all_cleared && (edits.all_cleared || !any_before);
    if (!edits.changed && known->edits.changed) {
      edits.changed = known->edits.changed;
      edits.changed_name = known->edits.changed_name;
    }
    if (!edits.stepped && known->edits.stepped) {
      edits.stepped = known->edits.stepped;
      edits.stepped_name = known->edits.stepped_name;
    }
    all->passes.insert(all->passes.end(), known->passes.begin(), known->passes.end());
  }
  return all;
}

bool gradients_were_changed(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  return std::any_of(registry().list.begin(), registry().list.end(),
                     [&](const AcceptingGradients* one) { return one->questions_.changed(parameters); });
}

bool scaled_gradients_wait(const ScaledPasses& scaled) {
  const MutexLock lock(registry().mutex);
  return std::any_of(registry().list.begin(), registry().list.end(),
                     [&](const AcceptingGradients* one) { return one->questions_.waits(scaled); });
}

std::string stepped_beside_scaler() {
  const MutexLock lock(registry().mutex);
  std::string name;
  for (const AcceptingGradients* one : registry().list)
    if (name.empty()) name = one->questions_.stepped();
  return name;
}

}  // namespace lockstep
