#include "base/library_thread.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/shared_segment.h"
#include "base/thread_token.h"

namespace lockstep {
namespace {

constexpr const char* kThreadFolder = "/proc/self/task";

/// The threads of this process; none if they cannot be read.
std::optional<std::set<pid_t>> all_threads() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(kThreadFolder), ::closedir);
  if (!folder) return std::nullopt;
  std::set<pid_t> threads;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string name = entry->d_name;
    pid_t thread = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), thread).ec == std::errc()) threads.insert(thread);
  }
  return threads;
}

struct LibraryThreads {
  Mutex mutex;
  unsigned generation LOCKSTEP_GUARDED_BY(mutex) = fork_generation();
  std::set<pid_t> threads LOCKSTEP_GUARDED_BY(mutex);

  void change(const std::function<void(std::set<pid_t>&)>& body) {
    const MutexLock lock(mutex);
    if (std::exchange(generation, fork_generation()) != fork_generation()) threads.clear();
    body(threads);
  }
};

LibraryThreads& library_threads() {
  static auto* const kThreads = new LibraryThreads;  // never freed: the last thread may end after main()
  return *kThreads;
}

/// Whether the thread waits in a futex without a time limit: only another thread of the process can wake it.
/// A thread that has ended counts as waiting.
bool waits_to_be_woken(pid_t thread) {
  errno = 0;
  std::ifstream file(std::string(kThreadFolder) + '/' + std::to_string(thread) + "/syscall");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.empty()) return errno == ENOENT || errno == ESRCH;
  std::istringstream words(text);  // "202 address operation value time-limit ..."; "running"
  std::string call, address, operation, value, limit;
  words >> call >> address >> operation >> value >> limit;
  if (call != std::to_string(SYS_futex)) return false;
  constexpr unsigned long kCommand = 0x7f, kWait = 0, kWaitBitset = 9;
  const unsigned long command = std::strtoul(operation.c_str(), nullptr, 16) & kCommand;
  return (command == kWait || command == kWaitBitset) && std::strtoul(limit.c_str(), nullptr, 16) == 0;
}

}  // namespace

std::thread library_thread(std::function<void()> body) {
  return std::thread([body = std::move(body)] {
    const auto own = static_cast<pid_t>(thread_number());
    library_threads().change([own](std::set<pid_t>& threads) { threads.insert(own); });
    body();
    library_threads().change([own](std::set<pid_t>& threads) { threads.erase(own); });
  });
}

AdoptsNewThreads::AdoptsNewThreads() : before_(all_threads().value_or(std::set<pid_t>())) {}

AdoptsNewThreads::~AdoptsNewThreads() {
  if (before_.empty()) return;  // they could not be read
  const std::set<pid_t> now = all_threads().value_or(before_);
  library_threads().change([&](std::set<pid_t>& threads) {
    std::erase_if(threads, [&](pid_t thread) { return !now.contains(thread); });
    for (const pid_t thread : now)
      if (!before_.contains(thread)) threads.insert(thread);
  });
}

bool another_thread_may_act(uint64_t caller) {
  const auto threads = all_threads();
  if (!threads) return true;
  std::set<pid_t> ours;
  library_threads().change([&](std::set<pid_t>& threads_now) { ours = threads_now; });
  for (const pid_t thread : *threads)
    if (thread != static_cast<pid_t>(caller) && !ours.contains(thread) && !waits_to_be_woken(thread)) return true;
  return false;
}

}  // namespace lockstep
