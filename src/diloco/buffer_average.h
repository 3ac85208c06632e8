#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <lockstep/named_tensors.h>

// Floating-point buffers, such as the statistics of a batch norm, in the contributions of machines that come and go.

namespace lockstep::diloco {

/// The bytes of buffer_bytes().
int64_t bytes_of_buffers(const NamedTensors& buffers);
/// Whether all are finite, and the numbers of those that are floating-point or complex.
std::string buffer_bytes(const NamedTensors& buffers);

/// The mean of several machines' buffers, in the order in which they are added.
class BufferAverage {
 public:
  explicit BufferAverage(const NamedTensors& buffers);
  /// Returns false for one with buffers that are not finite, which is left out.
  /// REQUIRES: `bytes` has bytes_of_buffers().
  bool add(std::string_view bytes);
  /// Sets the buffers, unless all were left out.
  void set() const;

 private:
  std::vector<at::Tensor> buffers_, sums_;  // sums: double
  int added_ = 0;
};

}  // namespace lockstep::diloco
