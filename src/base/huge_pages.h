#pragma once

#include <cstddef>

#include "base/clock.h"

namespace lockstep {

constexpr size_t kHugePage = size_t{2} << 20;

/// Asks the kernel to move memory that is often read or written as a whole into huge pages, one after the other until
/// `deadline`, for every whole huge page in [data, data + bytes). The contents are unchanged. If the kernel cannot
/// (Linux before 6.1, no free memory of this size), small pages stay.
void gather_into_huge_pages(const void* data, size_t bytes, Deadline deadline);

}  // namespace lockstep
