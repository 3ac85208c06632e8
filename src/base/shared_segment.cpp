#include "base/shared_segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "base/proc_file.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels answer EINVAL and pages come in by faults
#endif

namespace lockstep {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string megabytes(size_t bytes) {
  std::ostringstream text;
  text << (bytes + (1 << 20) - 1) / (1 << 20) << " MiB";
  return text.str();
}

[[noreturn]] void throw_no_memory(size_t wanted, const std::string& why) {
  throw LimitError("shared memory: wanted " + megabytes(wanted) + ", but only " + megabytes(available_memory_bytes()) +
                   " are available (" + why + "). Use fewer ranks or smaller buckets, or raise the memory limit.");
}

/// The remaining memory of one cgroup folder (limit - used), or SIZE_MAX without a limit.
size_t cgroup_room(const std::filesystem::path& folder, const char* limit_name, const char* used_name) {
  std::ifstream limit_file(folder / limit_name), used_file(folder / used_name);
  uint64_t limit = 0, used = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) return std::numeric_limits<size_t>::max();
  return limit > used ? limit - used : 0;
}

size_t cgroup_available() {
  size_t room = std::numeric_limits<size_t>::max();
  for (const Cgroup& group : own_cgroups()) {
    const bool v2 = group.is_v2();
    if (!v2 && !group.has("memory")) continue;
    std::filesystem::path folder = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const char* limit = v2 ? "memory.max" : "memory.limit_in_bytes";
    const char* used = v2 ? "memory.current" : "memory.usage_in_bytes";
    room = std::min(room, cgroup_room(folder, limit, used));
    for (const auto& part : std::filesystem::path(group.path).relative_path()) {
      folder /= part;
      room = std::min(room, cgroup_room(folder, limit, used));
    }
  }
  return room;
}

/// Whether the kernel gives huge pages only to shared memory that asks for them.
bool huge_pages_on_request() {
  static const bool on_request = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    std::string line;
    return std::getline(file, line) && line.find("[advise]") != std::string::npos;
  }();
  return on_request;
}

unsigned generation = 0;
std::atomic<size_t> mapped{0};

/// Segments that children of fork() copy. The mutex is held during a fork, so that a child finds them consistent.
struct Copied {
  Mutex mutex;
  std::vector<const SharedSegment*> segments LOCKSTEP_GUARDED_BY(mutex);
};
Copied& copied() {
  static auto& all = *new Copied;
  return all;
}

/// The kernel copies a page when the child writes it; copying everything now could take seconds and gigabytes.
void map_copies() LOCKSTEP_REQUIRES(copied().mutex) {
  for (const SharedSegment* segment : copied().segments)
    // If this fails, the child has no memory there, and faults on access.
    static_cast<void>(::mmap(segment->data(), segment->committed(), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_FIXED_NOREPLACE | MAP_NORESERVE, segment->fd(), 0));
  copied().segments.clear();  // its own children inherit the copies
}

}  // namespace

unsigned fork_generation() {
  // Not analysed: the mutex is held from one of these functions to another.
  static const int registered = pthread_atfork([]() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { copied().mutex.lock(); },
                                               []() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { copied().mutex.unlock(); },
                                               []() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
                                                 ++generation;
                                                 mapped = 0;  // a child has no mappings
                                                 map_copies();
                                                 copied().mutex.unlock();
                                               });
  (void)registered;
  return generation;
}

size_t mapped_segment_bytes() { return mapped.load(std::memory_order_relaxed); }

size_t available_memory_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  size_t available = std::numeric_limits<size_t>::max();
  for (std::string line; std::getline(meminfo, line);)
    if (line.rfind("MemAvailable:", 0) == 0) available = std::strtoull(line.c_str() + 13, nullptr, 10) * 1024;
  return std::min(available, cgroup_available());
}

// Delegates, so that the destructor unmaps if committing fails.
SharedSegment::SharedSegment(const std::string& name, size_t reserve_bytes, size_t commit_bytes, size_t apart_bytes)
    : SharedSegment() {
  size_ = reserve_bytes;
  apart_at_ = reserve_bytes - apart_bytes;
  fork_generation_ = lockstep::fork_generation();
  rlimit limit{};
  // Beyond this limit ftruncate would raise SIGXFSZ.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < reserve_bytes)
    throw_no_memory(reserve_bytes, "the file size limit, ulimit -f, is " + megabytes(limit.rlim_cur));
  fd_ = FileDescriptor(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) throw_errno<LimitError>("creating shared memory");
  if (::ftruncate(fd_.get(), static_cast<off_t>(reserve_bytes)) != 0) throw_errno<LimitError>("sizing shared memory");
  if (::fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0) throw_errno<LimitError>("sealing shared memory");
  map();
  commit(commit_bytes);
}

SharedSegment::SharedSegment(FileDescriptor fd, size_t expected_bytes)
    : fd_(std::move(fd)), size_(expected_bytes), fork_generation_(lockstep::fork_generation()) {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw_errno("looking at a peer's shared memory");
  if (static_cast<size_t>(status.st_size) != expected_bytes)
    throw Error("a peer's shared memory has " + std::to_string(status.st_size) + " bytes, not the " +
                std::to_string(expected_bytes) + " it announced");
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw Error("a peer's shared memory is not sealed");
  map();
}

SharedSegment::~SharedSegment() {
  if (data_ == nullptr || fork_generation_ != lockstep::fork_generation()) return;
  if (copied_) {
    const MutexLock lock(copied().mutex);
    std::erase(copied().segments, this);
  }
  ::munmap(data_, size_);
  mapped.fetch_sub(size_, std::memory_order_relaxed);
}

void SharedSegment::map() {
  void* address = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (address == MAP_FAILED) {
    const int code = errno;
    throw Error("shared memory: " + megabytes(size_) + " of address space could not be mapped: " + std::strerror(code) +
                ". The segments of this process's groups take " + megabytes(mapped_segment_bytes()) +
                "; destroy groups that are not needed, use fewer ranks, or raise the limit (ulimit -v).");
  }
  mapped.fetch_add(size_, std::memory_order_relaxed);
  data_ = static_cast<std::byte*>(address);
  ::madvise(data_, size_, MADV_DONTFORK);
  ::madvise(data_, size_, MADV_DONTDUMP);
  ::madvise(data_, size_, MADV_HUGEPAGE);  // a refusal does no harm
}

void SharedSegment::commit(size_t end) {
  if (end <= committed_) return;
  allocate(committed_, end, apart_at_);
  committed_ = end;
}

void SharedSegment::commit_apart(size_t begin, size_t end) { allocate(begin, end, size_); }

void SharedSegment::allocate(size_t begin, size_t end, size_t limit) {
  const size_t wanted = end - begin;
  if (end > limit)
    throw Error("shared memory: wanted " + megabytes(end) + " in one group, which has address space for only " +
                megabytes(limit) + "; the segments of this process's groups take " + megabytes(mapped_segment_bytes()) +
                " in all. Use fewer or smaller groups.");
  // The kernel would kill a process rather than refuse, so check first.
  if (wanted > available_memory_bytes()) throw_no_memory(wanted, "the limit of the machine or its cgroup");
  // Where huge pages must be requested, touch them first: the request applies to the mapping, and fallocate, which
  // bypasses it, would take small pages.
  if (huge_pages_on_request()) populate(begin, end);
  int result;
  do {
    result = ::fallocate(fd_.get(), 0, static_cast<off_t>(begin), static_cast<off_t>(wanted));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const int code = errno;
    throw_no_memory(wanted, std::strerror(code));
  }
  populate(begin, end);
}

void SharedSegment::copy_into_children() {
  if (std::exchange(copied_, true)) return;
  const MutexLock lock(copied().mutex);
  copied().segments.push_back(this);
}

void SharedSegment::populate(size_t begin, size_t end) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  begin = begin / page * page;
  end = std::min(size_, (end + page - 1) / page * page);
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
}

void SharedSegment::swap(SharedSegment& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(committed_, other.committed_);
  std::swap(apart_at_, other.apart_at_);
  std::swap(fork_generation_, other.fork_generation_);
}

}  // namespace lockstep
