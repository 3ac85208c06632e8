#include "c/handles.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "base/mutex.h"
#include "c/guarded.h"

namespace lockstep::c {
namespace {

/// Handles are aligned like pointers to any type.
constexpr uintptr_t kBetweenHandles = alignof(std::max_align_t);

struct Pending {
  Mutex mutex;
  uintptr_t last LOCKSTEP_GUARDED_BY(mutex) = 0;
  std::unordered_map<uintptr_t, PendingRequest> requests LOCKSTEP_GUARDED_BY(mutex);
};
Pending& pending() {
  static auto* const all = new Pending;  // a thread may end a request while the process ends
  return *all;
}

[[noreturn]] void refuse_handle(const char* function, const lockstep_request* request) {
  refuse(function, request == nullptr ? "the request is null"
                                      : "the request has already been waited for; wait for each request once");
}

}  // namespace

lockstep_request* make_request(PendingRequest content) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  all.last += kBetweenHandles;
  all.requests.emplace(all.last, std::move(content));
  return reinterpret_cast<lockstep_request*>(all.last);
}

PendingRequest find_request(const char* function, const lockstep_request* request) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  const auto found = all.requests.find(reinterpret_cast<uintptr_t>(request));
  if (found == all.requests.end()) refuse_handle(function, request);
  return found->second;
}

PendingRequest end_request(const char* function, const lockstep_request* request) {
  Pending& all = pending();
  const MutexLock lock(all.mutex);
  auto node = all.requests.extract(reinterpret_cast<uintptr_t>(request));
  if (node.empty()) refuse_handle(function, request);
  return std::move(node.mapped());
}

}  // namespace lockstep::c
