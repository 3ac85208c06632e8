#include "collectives/shm/segment/peer_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/mutex.h"

namespace lockstep::shm {
namespace {

struct KnownProcesses {
  Mutex mutex;
  std::map<pid_t, std::weak_ptr<const FileDescriptor>> descriptors LOCKSTEP_GUARDED_BY(mutex);
};
KnownProcesses& known_processes() {
  static KnownProcesses known;
  return known;
}

/// The descriptor of a live process, or null if none is available.
std::shared_ptr<const FileDescriptor> process_descriptor(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid <= 0 || pid == ::getpid()) return nullptr;
  KnownProcesses& all = known_processes();
  const MutexLock lock(all.mutex);
  auto& known = all.descriptors;
  if (auto shared = known[pid].lock()) {
    // While the process lives, no other process has its pid.
    pollfd entry{shared->get(), POLLIN, 0};
    if (::poll(&entry, 1, 0) == 0) return shared;
  }
  // Close-on-exec by definition.
  FileDescriptor opened(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (opened) {
    auto shared = std::make_shared<const FileDescriptor>(std::move(opened));
    known[pid] = shared;
    return shared;
  }
  known.erase(pid);
#endif
  return nullptr;
}

}  // namespace

PeerWatch::PeerWatch(pid_t pid, std::string host)
    : process_(process_descriptor(pid)), pid_(pid), host_(std::move(host)) {}

size_t PeerWatch::watched_processes() {
  KnownProcesses& all = known_processes();
  const MutexLock lock(all.mutex);
  return static_cast<size_t>(std::count_if(all.descriptors.begin(), all.descriptors.end(),
                                           [](const auto& entry) { return !entry.second.expired(); }));
}

bool PeerWatch::gone() const {
  pollfd entries[] = {{socket_.get(), POLLIN | POLLRDHUP, 0}, {process_ ? process_->get() : -1, POLLIN, 0}};
  return ::poll(entries, 2, 0) > 0;
}

std::string PeerWatch::text() const { return "pid " + std::to_string(pid_) + " on " + host_; }

}  // namespace lockstep::shm
