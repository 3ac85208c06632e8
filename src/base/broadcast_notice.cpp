#include "base/broadcast_notice.h"

#include <mutex>
#include <vector>

namespace lockstep {
namespace {

using Follow = std::function<void(const SetTensors&)>;

std::mutex followers_mutex;
std::vector<std::weak_ptr<const Follow>> followers;  // guarded by followers_mutex

}  // namespace

std::shared_ptr<const void> on_broadcast(Follow follow) {
  auto kept = std::make_shared<const Follow>(std::move(follow));
  const std::lock_guard lock(followers_mutex);
  std::erase_if(followers, [](const auto& follower) { return follower.expired(); });
  followers.push_back(kept);
  return kept;
}

void notice_broadcast(const SetTensors& tensors) {
  std::vector<std::shared_ptr<const Follow>> present;
  {
    const std::lock_guard lock(followers_mutex);
    for (const auto& follower : followers)
      if (auto kept = follower.lock()) present.push_back(std::move(kept));
  }
  for (const auto& follow : present) (*follow)(tensors);
}

}  // namespace lockstep
