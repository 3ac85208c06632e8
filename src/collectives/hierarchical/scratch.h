#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::hierarchical_engine {

/// Memory that successive operations reuse.
class Scratch {
 public:
  std::byte* get(size_t bytes) {
    if (memory_.size() < bytes) memory_.resize(bytes);
    return memory_.data();
  }

 private:
  std::vector<std::byte> memory_;
};

}  // namespace lockstep::hierarchical_engine
