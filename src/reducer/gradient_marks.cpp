#include "reducer/gradient_marks.h"

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

AcceptingGradients::AcceptingGradients(std::function<void(const TensorSet& parameters)> accept,
                                       std::function<std::optional<Group>(const TensorSet& parameters)> ranks,
                                       std::function<std::optional<bool>(const TensorSet& parameters)> contributed)
    : accept_(std::move(accept)), ranks_(std::move(ranks)), contributed_(std::move(contributed)) {
  const MutexLock lock(registry().mutex);
  registry().list.push_back(this);
}

AcceptingGradients::~AcceptingGradients() {
  const MutexLock lock(registry().mutex);
  std::erase(registry().list, this);
}

void accept_gradients(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  for (const AcceptingGradients* one : registry().list) one->accept_(parameters);
}

std::optional<Group> ranks_that_reduce(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  for (const AcceptingGradients* one : registry().list)
    if (const auto ranks = one->ranks_(parameters)) return ranks;
  return std::nullopt;
}

std::optional<bool> has_contributed(const TensorSet& parameters) {
  const MutexLock lock(registry().mutex);
  std::optional<bool> any;
  for (const AcceptingGradients* one : registry().list)
    if (const auto contributed = one->contributed_(parameters)) any = any.value_or(false) || *contributed;
  return any;
}

}  // namespace lockstep
