#include "c/handles.h"

#include <deque>

#include "base/mutex.h"
#include "c/guarded.h"

namespace lockstep::c {
namespace {

/// A request's memory is used again after this many others have ended.
constexpr size_t kRested = 4096;

struct Ended {
  Mutex mutex;
  std::deque<lockstep_request*> requests LOCKSTEP_GUARDED_BY(mutex);
};
Ended& ended() {
  static auto* const all = new Ended;  // a thread may end a request while the process ends
  return *all;
}

}  // namespace

void check_request(const char* function, const lockstep_request* request) {
  if (request == nullptr) refuse(function, "the request is null");
  if (request->state == nullptr)
    refuse(function, "the request has been waited for already; every request is waited for once");
}

lockstep_request* make_request(lockstep_request content) {
  Ended& all = ended();
  {
    const MutexLock lock(all.mutex);
    if (all.requests.size() > kRested) {
      lockstep_request* const request = all.requests.front();
      all.requests.pop_front();
      *request = std::move(content);
      return request;
    }
  }
  return new lockstep_request(std::move(content));
}

lockstep_request end_request(lockstep_request* request) {
  lockstep_request content = std::exchange(*request, lockstep_request{});
  Ended& all = ended();
  const MutexLock lock(all.mutex);
  all.requests.push_back(request);
  return content;
}

}  // namespace lockstep::c
