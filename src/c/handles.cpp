#include "c/handles.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/mutex.h"
#include "base/text.h"
#include "c/guarded.h"

namespace lockstep::c {
namespace {

/// Handles are aligned like pointers to any type.
constexpr uintptr_t kBetweenHandles = alignof(std::max_align_t);

[[noreturn]] void refuse_handle(const char* function, const lockstep_request* request) {
  refuse(function, request == nullptr ? "the request is null"
                                      : "the request has already been waited for; wait for each request once");
}

struct Pending {
  PendingRequest& find(const char* function, const lockstep_request* request) LOCKSTEP_REQUIRES(mutex) {
    const auto found = requests.find(reinterpret_cast<uintptr_t>(request));
    if (found == requests.end() || found->second.is_waited_for) refuse_handle(function, request);
    return found->second;
  }

  Mutex mutex;
  uintptr_t last LOCKSTEP_GUARDED_BY(mutex) = 0;
  std::unordered_map<uintptr_t, PendingRequest> requests LOCKSTEP_GUARDED_BY(mutex);
};
Pending& pending() {
  static auto* const all = new Pending;  // a thread may end a request while the process ends
  return *all;
}

}  // namespace

lockstep_request* make_request(PendingRequest content) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  all.last += kBetweenHandles;
  all.requests.emplace(all.last, std::move(content));
  return reinterpret_cast<lockstep_request*>(all.last);
}

PendingRequest test_request(const char* function, const lockstep_request* request) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  PendingRequest& found = all.find(function, request);
  if (!found.tested_since) found.tested_since = Clock::now();
  return found;
}

PendingRequest wait_for_request(const char* function, const lockstep_request* request) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  PendingRequest& found = all.find(function, request);
  found.is_waited_for = true;
  return found;
}

void end_request(const lockstep_request* request) noexcept {
  Pending& all = pending();
  std::unordered_map<uintptr_t, PendingRequest>::node_type ended;  // the last request of a group frees it: unlocked
  const MutexLock lock(all.mutex);
  ended = all.requests.extract(reinterpret_cast<uintptr_t>(request));
}

std::optional<Use> pending_use(MemoryRange memory) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  for (const auto& [number, request] : all.requests)
    if (!request.work->done() && (memory.overlaps(request.use.read) || memory.overlaps(request.use.written)))
      return request.use;
  return std::nullopt;
}

void keep_memory(const std::shared_ptr<GroupState>& left) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  for (auto& [number, request] : all.requests)
    if (!request.work->done() &&
        (left->handed_out.overlaps(request.use.read) || left->handed_out.overlaps(request.use.written)))
      request.memory.push_back(left);
}

std::string Use::text() const {
  return function + (" of " + counted(count, "element", "elements")) + " of " +
         shm::name(static_cast<shm::DataType>(dtype));
}

}  // namespace lockstep::c
