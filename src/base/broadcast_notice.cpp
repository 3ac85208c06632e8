#include "base/broadcast_notice.h"

#include <vector>

#include "base/mutex.h"

namespace lockstep {
namespace {

using Listener = std::function<void(const SetTensors&)>;

Mutex listeners_mutex;
std::vector<std::weak_ptr<const Listener>> listeners LOCKSTEP_GUARDED_BY(listeners_mutex);

}  // namespace

std::shared_ptr<const void> on_broadcast(Listener listener) {
  auto kept = std::make_shared<const Listener>(std::move(listener));
  const MutexLock lock(listeners_mutex);
  std::erase_if(listeners, [](const auto& known) { return known.expired(); });
  listeners.push_back(kept);
  return kept;
}

void notify_broadcast(const SetTensors& tensors) {
  std::vector<std::shared_ptr<const Listener>> present;
  {
    const MutexLock lock(listeners_mutex);
    for (const auto& listener : listeners)
      if (auto kept = listener.lock()) present.push_back(std::move(kept));
  }
  for (const auto& listener : present) (*listener)(tensors);
}

}  // namespace lockstep
