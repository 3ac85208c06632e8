#pragma once

#include <cstddef>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// Anonymous memory that several processes map: a sealed memfd. It has no name, so SIGKILL leaves nothing behind.
///
/// The size is fixed at construction (sealed against shrinking and growing). Memory is not: a prefix is committed at
/// once, and the owner commits more later. Only committed memory may be touched. Committing either succeeds or throws
/// Error with the wanted and the available size, so a full machine never causes SIGBUS. A forked child does not inherit
/// the mapping (MADV_DONTFORK); destroying the object there does nothing. After copy_into_children() a child has its
/// own copy of the committed memory at the same address.
class SharedSegment {
 public:
  SharedSegment() = default;
  /// `name` appears only in /proc/<pid>/maps. Maps `reserve_bytes` of address space and commits the first
  /// `commit_bytes`. If there is not enough address space, throws Error with the size of this process's segments.
  /// The last `apart_bytes` are for commit_apart().
  SharedSegment(const std::string& name, size_t reserve_bytes, size_t commit_bytes, size_t apart_bytes = 0);
  /// Maps a segment that another process made. Throws unless it is sealed and has exactly `expected_bytes`.
  SharedSegment(FileDescriptor fd, size_t expected_bytes);
  SharedSegment(SharedSegment&& other) noexcept { swap(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedSegment();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  size_t committed() const { return committed_; }
  int fd() const { return fd_.get(); }
  /// Closes the descriptor; the mapping stays. The segment can then no longer be passed on or committed.
  void close_descriptor() { fd_.reset(); }

  /// Commits all memory below `end` that is not committed yet. Owner only.
  void commit(size_t end);
  /// Commits [begin, end) of the part that is apart, of which a forked child has no copy. Owner only.
  void commit_apart(size_t begin, size_t end);
  /// Lets a child of fork() read the committed memory and write its own copy of it, so that tensors may lie there.
  /// Pages that the child has not written show the owner's later writes. Owner only; the object must not be moved
  /// afterwards.
  void copy_into_children();
  /// Populates this process's page table with the pages of [begin, end), which their owner has committed.
  void populate(size_t begin, size_t end);

 private:
  void map();
  void allocate(size_t begin, size_t end, size_t limit);
  void swap(SharedSegment& other) noexcept;

  FileDescriptor fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t committed_ = 0;
  size_t apart_at_ = 0;
  unsigned fork_generation_ = 0;
  bool copied_ = false;
};

/// Bytes that can still be allocated: the kernel's estimate for the machine, or less if a cgroup limits memory.
size_t available_memory_bytes();

/// Address space of this process's mapped segments, its own and others'. Any thread may call.
size_t mapped_segment_bytes();

/// The number of forks between the program's start and this process. Cheap; distinguishes a child from the process that
/// made an object.
unsigned fork_generation();

}  // namespace lockstep
