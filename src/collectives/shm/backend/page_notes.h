#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::shm_engine {

/// Shows operations on this rank's page, where nothing above the backend does. `operation` is only compared: it
/// identifies the operation that the page shows, because a program may have several groups, each with its own numbers.
/// `title` is a TensorRequest's. From any thread.
void note_start(const void* operation, const char* title, const std::vector<at::Tensor>& inputs, uint64_t sequence);
void note_end(const void* operation, uint64_t sequence, bool failed);

}  // namespace lockstep::shm_engine
