#pragma once

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace lockstep {

struct AutocastOptions {
  c10::DeviceType device = c10::kCPU;
  /// bfloat16 or half. Unset: torch's own for the device, bfloat16 on CPUs and half on CUDA.
  std::optional<c10::ScalarType> dtype;
  /// False: within an enclosing guard, compute in the tensors' own dtypes again.
  bool enabled = true;
  /// Cast each parameter once until the outermost guard goes, not once a use.
  bool cache_enabled = true;
};

/// While it lives, on this thread, matrix products and convolutions on `device` compute in 16 bits, operators that
/// need the range in 32, and parameters and their gradients stay what they are: PyTorch's torch.autocast. Guards nest;
/// the outermost one drops the cached casts as it goes, so one forward a guard: weights that an optimizer has changed
/// are cast anew. backward() belongs outside of it, where it computes as forward did.
class AutocastGuard {
 public:
  /// TORCH_CHECK fails for a device without autocast, and for a dtype that is none of the two.
  explicit AutocastGuard(const AutocastOptions& options);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
  bool cache_before_;
};

///     at::Tensor loss;
///     {
///       const auto bf16 = lockstep::autocast();
///       loss = cross_entropy(model(data), target);
///     }
///     loss.backward();
[[nodiscard]] inline AutocastGuard autocast(const AutocastOptions& options = {}) { return AutocastGuard(options); }

}  // namespace lockstep
