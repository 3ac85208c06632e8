#include "checkpoint/memory/mapped_slots.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/huge_pages.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"
#include "checkpoint/memory/record_word.h"
#include "collectives/shm/kernels/stream_copy.h"

namespace lockstep {
namespace {

constexpr uint64_t kStatePage = 4096;
constexpr uint64_t kWorthStreaming = 16 << 10;
constexpr std::chrono::milliseconds kForHugePages(
    500);  // of a window or a part of one, once: about as long as 256 MiB take

std::string mebibytes(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

}  // namespace

MappedSlots::MappedSlots(int fd) : fd_(fd), fork_generation_(lockstep::fork_generation()) {
  if (!StateMemory::is(fd))
    throw Error("the launcher's memory for states is not open as descriptor " + std::to_string(fd));
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  records_ = map(0, StateMemory::kRecordsBytes);
}

MappedSlots::~MappedSlots() {
  unmap(records_);
  for (Mapping& window : windows_) unmap(window);
}

void MappedSlots::unmap(Mapping& mapping) {
  if (mapping.data != nullptr && fork_generation_ == lockstep::fork_generation()) ::munmap(mapping.data, mapping.bytes);
  mapping = {};
}

MappedSlots::Mapping MappedSlots::map(uint64_t offset, uint64_t bytes) const {
  const auto fail = [&] { throw_errno<LimitError>("mapping " + mebibytes(bytes) + " of memory for a state"); };
  // Huge pages lie in the file at multiples of their size, and must do so in memory.
  const size_t around = bytes + kHugePage;
  void* room = ::mmap(nullptr, around, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) fail();
  auto* start = static_cast<std::byte*>(room);
  const size_t before = (offset - reinterpret_cast<uintptr_t>(room)) % kHugePage;
  void* address = ::mmap(start + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_,
                         static_cast<off_t>(offset));
  if (address == MAP_FAILED) {
    const int code = errno;
    ::munmap(room, around);
    errno = code;
    fail();
  }
  if (before > 0) ::munmap(start, before);
  ::munmap(start + before + bytes, around - before - bytes);
  ::madvise(address, bytes, MADV_DONTFORK);
  ::madvise(address, bytes, MADV_DONTDUMP);
  return {.data = static_cast<std::byte*>(address), .offset = offset, .bytes = bytes};
}

void MappedSlots::open_window(Window window, uint64_t offset, uint64_t bytes) {
  Mapping& mapping = windows_[window];
  unmap(mapping);
  const uint64_t begin = offset / kStatePage * kStatePage;
  const uint64_t end = (offset + bytes + kStatePage - 1) / kStatePage * kStatePage;
  if (begin == end) return;
  commit(begin, end);
  mapping = map(begin, end - begin);
  gather_into_huge_pages(mapping.data, mapping.bytes, Deadline(kForHugePages));
}

void MappedSlots::open_sparse_window(Window window, uint64_t offset, uint64_t bytes) {
  unmap(windows_[window]);
  const uint64_t begin = offset / kStatePage * kStatePage;
  const uint64_t end = (offset + bytes + kStatePage - 1) / kStatePage * kStatePage;
  if (begin != end) windows_[window] = map(begin, end - begin);
}

void MappedSlots::commit_in(Window window, uint64_t offset, uint64_t bytes) {
  Mapping& mapping = windows_[window];
  const uint64_t begin = offset / kStatePage * kStatePage;
  const uint64_t end = (offset + bytes + kStatePage - 1) / kStatePage * kStatePage;
  if (begin == end) return;
  try {
    commit(begin, end);
  } catch (const Error&) {
    unmap(mapping);
    throw;
  }
  if (std::byte* place = place_of(begin, end - begin))
    gather_into_huge_pages(place, end - begin, Deadline(kForHugePages));
}

void MappedSlots::release(uint64_t offset, uint64_t bytes) const {
  const uint64_t begin = (offset + kStatePage - 1) / kStatePage * kStatePage;
  const uint64_t end = (offset + bytes) / kStatePage * kStatePage;
  // If the kernel refuses, it keeps pages that nobody reads.
  if (begin < end)
    ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                static_cast<off_t>(end - begin));
}

void MappedSlots::commit(uint64_t begin, uint64_t end) const {
  const auto refuse = [&](const std::string& why) {
    throw LimitError("a state in memory: this rank's part takes " + mebibytes(end - begin) + ", but only " +
                     mebibytes(available_memory_bytes()) + " are available (" + why + ")");
  };
  // The kernel would kill a process rather than refuse, so check first. Memory already committed costs nothing.
  if (end - begin > available_memory_bytes() + committed_bytes()) refuse("the limit of the machine or its cgroup");
  int result;
  do {
    result = ::fallocate(fd_, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  } while (result != 0 && errno == EINTR);
  if (result != 0) refuse(std::strerror(errno));
}

std::byte* MappedSlots::place_of(uint64_t offset, uint64_t bytes) const {
  for (const Mapping& window : windows_)
    if (window.data != nullptr && offset >= window.offset && bytes <= window.bytes &&
        offset - window.offset <= window.bytes - bytes)
      return window.data + (offset - window.offset);
  return nullptr;
}

uint64_t MappedSlots::load(uint64_t offset) const { return load_record_word(records_.data + offset); }

void MappedSlots::store(uint64_t offset, uint64_t word) { store_record_word(records_.data + offset, word); }

void MappedSlots::write(uint64_t offset, const void* data, uint64_t bytes) {
  std::byte* place = place_of(offset, bytes);
  if (place == nullptr) return write_through(offset, static_cast<const char*>(data), bytes);
  if (bytes >= kWorthStreaming)
    shm::stream_copy_from_memory(place, static_cast<const std::byte*>(data), bytes);
  else
    std::memcpy(place, data, bytes);
}

void MappedSlots::write_through(uint64_t offset, const char* data, uint64_t bytes) const {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd_, data, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw_errno<LimitError>("writing " + mebibytes(bytes) + " of a state to memory");
    data += done;
    offset += static_cast<uint64_t>(done);
    bytes -= static_cast<uint64_t>(done);
  }
}

void MappedSlots::read(uint64_t offset, void* to, uint64_t bytes) const {
  for (auto* place = static_cast<char*>(to); bytes > 0;) {
    const ssize_t done = ::pread(fd_, place, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw_errno<RefusedInput>("reading a state in memory");
    place += done;
    offset += static_cast<uint64_t>(done);
    bytes -= static_cast<uint64_t>(done);
  }
}

uint64_t MappedSlots::committed_bytes() const {
  struct stat status {};
  return ::fstat(fd_, &status) == 0 ? static_cast<uint64_t>(status.st_blocks) * 512 : 0;
}

}  // namespace lockstep
