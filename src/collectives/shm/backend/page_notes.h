#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::shm_engine {

/// What this rank's page tells the launcher of operations, where nothing above the backend does. `operation` is only
/// compared: it tells which one the page tells of, since numbers are those of a group, and a program may have several.
/// `title` is a TensorRequest's. From any thread.
void note_start(const void* operation, const char* title, const std::vector<at::Tensor>& inputs, uint64_t sequence);
void note_end(const void* operation, uint64_t sequence, bool failed);

}  // namespace lockstep::shm_engine
