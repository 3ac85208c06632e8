#include "collectives/shm/segment/arena.h"

#include "base/error.h"
#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

Arena::Arena(std::shared_ptr<SharedSegment> segment, size_t begin)
    : segment_(std::move(segment)), begin_(begin), fork_generation_(lockstep::fork_generation()) {
  segment_->copy_into_children();
}

std::byte* Arena::allocate(size_t bytes) {
  if (fork_generation_ != lockstep::fork_generation())
    throw Error("a group's memory belongs to the process that made the group, not to a child it forked");
  const size_t wanted = Geometry::round_up(bytes == 0 ? 1 : bytes, 4096);
  const MutexLock lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)
    if (it->second >= wanted && (best == free_.end() || it->second < best->second)) best = it;
  size_t offset = end_;
  if (best != free_.end()) {
    offset = best->first;
    const size_t rest = best->second - wanted;
    free_.erase(best);
    if (rest > 0) free_[offset + wanted] = rest;
  } else {
    segment_->commit(begin_ + end_ + wanted);
    end_ += wanted;
  }
  used_[offset] = wanted;
  return segment_->data() + begin_ + offset;
}

void Arena::free(void* memory) {
  if (fork_generation_ != lockstep::fork_generation()) return;  // another thread may have held the mutex at the fork
  const MutexLock lock(mutex_);
  const auto used = used_.find(offset(memory));
  if (used == used_.end()) throw Error("this memory was not allocated by this group, or was freed before");
  auto [begin, bytes] = *used;
  used_.erase(used);
  const auto next = free_.find(begin + bytes);
  if (next != free_.end()) {
    bytes += next->second;
    free_.erase(next);
  }
  auto previous = free_.lower_bound(begin);
  if (previous != free_.begin() && (--previous)->first + previous->second == begin)
    previous->second += bytes;
  else
    free_[begin] = bytes;
}

}  // namespace lockstep::shm
