#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <unordered_set>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "base/hash.h"

namespace lockstep {

/// Of three places of a tensor on the CPU: what differs, or was changed, as a whole differs in them.
inline uint64_t sample_of(const at::Tensor& tensor) {
  uint64_t hash = Hash::kStart;
  const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t size = tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : 0, piece = std::min<size_t>(size, 8);
  for (const size_t at : {size_t{0}, (size - piece) / 2, size - piece}) {
    uint64_t word = 0;
    if (piece > 0) std::memcpy(&word, bytes + at, piece);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// What changes when somebody writes into a gradient: its version, and, because .data() has none, a sample of it. On a
/// device, where reading waits for what is queued, only the version.
inline uint64_t mark_of(const at::Tensor& gradient) {
  const auto version = static_cast<uint64_t>(gradient._version());
  return gradient.is_cpu() ? Hash::mixed(sample_of(gradient), version) : version;
}

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

/// While it lives, accept_gradients() calls `accept`, ranks_that_reduce() `ranks`, and has_contributed() `contributed`.
class AcceptingGradients {
 public:
  AcceptingGradients(std::function<void(const TensorSet& parameters)> accept,
                     std::function<std::optional<Group>(const TensorSet& parameters)> ranks,
                     std::function<std::optional<bool>(const TensorSet& parameters)> contributed);
  ~AcceptingGradients();
  AcceptingGradients(const AcceptingGradients&) = delete;
  AcceptingGradients& operator=(const AcceptingGradients&) = delete;

 private:
  friend void accept_gradients(const TensorSet& parameters);
  friend std::optional<Group> ranks_that_reduce(const TensorSet& parameters);
  friend std::optional<bool> has_contributed(const TensorSet& parameters);
  const std::function<void(const TensorSet& parameters)> accept_;
  const std::function<std::optional<Group>(const TensorSet& parameters)> ranks_;
  const std::function<std::optional<bool>(const TensorSet& parameters)> contributed_;
};

/// This library has changed the gradients of these parameters, on all ranks in the same way: where an optimizer sums
/// them in its step (Reducer::defer), that is no error.
void accept_gradients(const TensorSet& parameters);

/// The ranks that have reduced the gradients of some of these parameters together, or will in an optimizer's step, so
/// that all of them are at this place now. None: the gradients are this process's own, or ranks may have run out of
/// inputs.
std::optional<Group> ranks_that_reduce(const TensorSet& parameters);

/// Whether backward passes of this rank are certain to be in the gradients of some of these parameters: false where it
/// skipped its step or had run out of inputs. None: no reducer follows them.
std::optional<bool> has_contributed(const TensorSet& parameters);

}  // namespace lockstep
