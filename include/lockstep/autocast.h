#pragma once

#include <lockstep/cxx20.h>

#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace lockstep {

struct AutocastOptions {
  c10::DeviceType device = c10::kCPU;
  /// bfloat16 or half. Unset: torch's default for the device, bfloat16 on CPUs and half on CUDA.
  std::optional<c10::ScalarType> dtype{};
  /// False: within an enclosing guard, compute in the tensors' own dtypes.
  bool enabled = true;
  /// Cast each parameter once until the outermost guard ends, not once per use.
  bool cache_enabled = true;
};

/// While a guard lives, on its thread, matrix products and convolutions on `device` compute in 16 bits, and operators
/// that need the range of float compute in 32. Parameters and their gradients keep their dtype. This is PyTorch's
/// torch.autocast. Guards nest. The outermost one drops the cached casts when it ends: use one guard per forward, so
/// that weights that an optimizer has changed are cast again. Call backward() outside the guard: it computes in the
/// dtypes that forward used.
class AutocastGuard {
 public:
  /// TORCH_CHECK fails for a device without autocast, and for any other dtype.
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
