#include <lockstep/kept_memory.h>

#include "data_parallel/tensor_memory.h"

namespace lockstep {

KeptMemory::KeptMemory() : memory_(std::make_unique<TensorMemory>(/*keep=*/true)) {}
KeptMemory::~KeptMemory() = default;
KeptMemory::KeptMemory(KeptMemory&&) noexcept = default;
KeptMemory& KeptMemory::operator=(KeptMemory&&) noexcept = default;

void KeptMemory::end_step() {
  if (memory_) memory_->end_step();
}

}  // namespace lockstep
