#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

namespace lockstep {
namespace {

constexpr int kMadvCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, newer than some headers; older kernels answer EINVAL

}  // namespace

void gather_into_huge_pages(const void* data, size_t bytes, Deadline deadline) {
  char* const bytes_at = static_cast<char*>(const_cast<void*>(data));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, end = begin + bytes;
  for (uintptr_t page = first; page + kHugePage <= end && !deadline.passed(); page += kHugePage)
    if (::madvise(bytes_at + (page - begin), kHugePage, kMadvCollapse) != 0 && errno != EAGAIN && errno != EBUSY)
      return;
}

}  // namespace lockstep
