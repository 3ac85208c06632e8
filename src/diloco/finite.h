#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/diloco.h>
#include <lockstep/named_tensors.h>

#include "diloco/machines.h"

// Infinity and NaN in what machines share.

namespace lockstep::diloco {

/// The first of the parameters that would not be finite after it is set from its part of the outer copy.
std::optional<size_t> first_not_finite(const std::vector<at::Tensor>& parameters, const at::Tensor& outer);
/// Why no machine can continue from an outer copy with such a parameter; at step 0: begin with it.
std::string outer_problem(const std::string& parameter, int64_t step, const DiLoCoOptions& options,
                          const Machines& machines);

/// The last rounds of each fragment, in a row, in which the parameters of no machine were finite. The same on all
/// machines.
struct EmptyRounds {
  std::map<size_t, std::vector<int64_t>> of_fragment;

  /// Returns why a fragment learns nothing any more, if `round` is the last of `most` of them; else "".
  std::string note(size_t fragment, int64_t round, bool is_empty, int64_t most);
};

/// Sets the floating-point buffers of all ranks to the mean over the machines whose first ranks have only finite ones.
/// Warns of the others; without any machine they stay as they are. Every rank calls it.
void average_finite_buffers(const Machines& machines, const NamedTensors& buffers);

}  // namespace lockstep::diloco
