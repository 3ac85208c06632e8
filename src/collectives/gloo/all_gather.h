#pragma once

#include <ATen/core/Tensor.h>

#include "collectives/gloo/messages.h"

namespace lockstep::gloo_engine {

/// Row r of `rows` becomes rank r's `row`, which may be that row itself: every rank sends its row to all others, and
/// receives theirs in place. Both are contiguous. Throws what a message's wait() throws.
void all_gather(const at::Tensor& rows, const at::Tensor& row, int rank, int world_size, const Messages& messages);

}  // namespace lockstep::gloo_engine
